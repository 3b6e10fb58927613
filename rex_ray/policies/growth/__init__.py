"""Growth of the global batch: one part, its rules for naming a batch, and what they need to know."""
