"""The phases of a run: the phase clock, its counts, and the phases of a device that works
asynchronously."""
