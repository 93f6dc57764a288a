"""What work costs, as arithmetic: FLOPs and bytes from sizes, and the least time that a machine needs for them."""
