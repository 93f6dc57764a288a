"""Time of a run by phase (data, forward, backward and so on)."""
