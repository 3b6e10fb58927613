"""What is measured of a step: its times and its gradient's norms."""
