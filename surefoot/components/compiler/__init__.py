"""Use of torch.compile: regions of a model, the time to compile them, and recompilations."""
