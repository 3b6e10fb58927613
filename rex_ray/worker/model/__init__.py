"""The model side: one model on all ranks, its weights, its backward passes and its updates."""
