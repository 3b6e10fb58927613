"""rex_ray inside other trainers: Hugging Face, Accelerate, Lightning."""
