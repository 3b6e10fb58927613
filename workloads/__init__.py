"""Real models on real data, each one training loop that a user could have written. Not part of the library."""
