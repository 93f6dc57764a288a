"""Data sources, which return samples by number: arrays, token streams, files, iterables."""
