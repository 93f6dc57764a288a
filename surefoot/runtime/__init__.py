"""Layer between model and machine: process groups, module attributes, host copies of state."""
