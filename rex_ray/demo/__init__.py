"""What ``rex-ray demo`` runs."""
