"""Layouts of ranks and stragglers, as pure functions that need no running rank."""
