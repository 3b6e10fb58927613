"""The torch side of a worker: session, loader, weights, probes, switch. Knows nothing of Ray."""
