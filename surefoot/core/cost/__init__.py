"""Cost models: FLOPs and bytes from tensor sizes, and the minimum time that a machine needs."""
