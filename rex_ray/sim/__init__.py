"""The virtual-time driver of the same controller. No Ray, no torch, no clock."""
