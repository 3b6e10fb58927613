"""What ranks agree on beside the gradient: who they are, and when shares change."""
