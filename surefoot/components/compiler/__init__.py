"""torch.compile: the compiled regions of a model, the cost of compiling them, and the reasons for
recompilation."""
