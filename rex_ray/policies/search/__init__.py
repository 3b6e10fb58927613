"""Searching beyond the curves: when to ask, how candidates are timed, and the duel that decides."""
