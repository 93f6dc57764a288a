"""The tables of this group of verbs: each prints what was measured, and a verdict on it."""
