"""The slowdown trigger: what it notices, what it measures against, and what it does about it."""
