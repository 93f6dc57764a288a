"""Measurements of what another spec would cost or gain, before it is chosen."""
