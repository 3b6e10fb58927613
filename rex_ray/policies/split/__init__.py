"""Shares of a global batch: set by hand, or from measured curves."""
