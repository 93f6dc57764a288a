"""Subcommands that measure, improve or verify training."""
