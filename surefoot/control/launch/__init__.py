"""Starting the ranks of a run: here on one host; several hosts are left to engines that exist."""

from surefoot.control.launch.local import launch

__all__ = ["launch"]
