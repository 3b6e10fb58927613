"""From values and drawings to one HTML file."""
