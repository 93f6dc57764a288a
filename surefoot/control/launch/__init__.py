"""Start the ranks of a run on one host; for several hosts use torchrun, Slurm or the like."""

from surefoot.control.launch.local import launch

__all__ = ["launch"]
