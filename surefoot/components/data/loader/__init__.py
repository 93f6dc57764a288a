"""Data loader: workers read batches ahead, in the order of the run."""
