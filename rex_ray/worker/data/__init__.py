"""The data side: which rows a rank gets at which step, and how they get to it."""
