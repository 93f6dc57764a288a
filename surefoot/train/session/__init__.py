"""Attempt at a run: its folder, what it records and saves, and its start and end."""
