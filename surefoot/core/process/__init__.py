"""Facts about this process: owner of a stack frame, launcher, memory limits, forking."""
