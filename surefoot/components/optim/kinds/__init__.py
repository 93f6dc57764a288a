"""Optimisers that torch has not, each a torch optimiser like any other."""
