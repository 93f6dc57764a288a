"""Measurements of what a different spec would cost or gain, before it is chosen."""
