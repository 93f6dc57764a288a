"""Optimizers that torch does not have, each a subclass of torch.optim.Optimizer."""
