"""Diagnosis of a failed run: whose error it is, its cause, the remedy, and the retry of a step."""
