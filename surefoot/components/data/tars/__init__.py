"""Tars of samples in the WebDataset layout, read sequentially or by sample number."""
