"""Modules that plan runs, launch them and read what they wrote, without torch."""
