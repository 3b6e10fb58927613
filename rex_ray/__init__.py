"""rex_ray: fast synchronous PyTorch training on clusters of mixed GPUs, as a Ray Train trainer."""
