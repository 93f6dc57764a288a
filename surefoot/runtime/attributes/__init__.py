"""State in plain attributes of a model's modules, which PyTorch neither moves nor saves."""
