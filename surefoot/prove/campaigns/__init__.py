"""Fault campaigns: real processes that are killed, real files that are damaged, real disks that are full."""
