"""Data loader: batches read ahead by workers, in the order of the run."""
