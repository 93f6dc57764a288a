"""Layouts of ranks and detection of stragglers, as functions that need no running rank."""
