"""Device profiles, noise, slowdown episodes and networks: the world that a simulator or an emulation plays. Pure."""
