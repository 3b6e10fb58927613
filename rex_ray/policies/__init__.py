"""Policies: compositions of batch growth, load split and slowdown trigger, and wrappers around them. Pure."""
