"""Diagnosis of a failed run: whose code failed, why, a remedy, and the repetition of a step."""
