"""What is computed of a run beyond its journal's own rows: curves, speeds, saving, losses. Arrays in, facts out."""
