"""Plain ``torchrun`` without Ray: the same sessions and the same controller over a small TCP link."""
