"""When a run cannot go on: whose error it is, what caused it, and where that can be mended, the step once more."""
