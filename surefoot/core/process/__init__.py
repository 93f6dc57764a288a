"""Facts about this process: launcher, memory limits, signals, forks and owners of stack frames."""
