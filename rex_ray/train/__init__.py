"""The Ray Train side: trainer, control actor, telemetry, placement, an emulated mixed cluster."""
