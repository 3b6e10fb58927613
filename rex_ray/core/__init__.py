"""Vocabulary and mathematics. Pure: no clock, no files, no randomness, no torch, no Ray."""
