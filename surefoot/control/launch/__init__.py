"""Launcher for the ranks of a run on one host; for several hosts, use torchrun or Slurm."""

from surefoot.control.launch.local import launch

__all__ = ["launch"]
