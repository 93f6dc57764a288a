"""The control wing: plans runs and reads what they wrote, without torch."""
