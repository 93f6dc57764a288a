"""The phases of a run: the clock that is switched between them, what it counts, a device that works beside the host."""
