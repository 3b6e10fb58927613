"""A look at every worker before training: what it has, whether it fits the others, whether they reach one another."""
