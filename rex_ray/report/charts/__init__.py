"""From arrays to drawings: SVG by hand, no script, no network."""
