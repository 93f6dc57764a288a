"""Fault campaigns: real processes that are killed, real files that are damaged, real disks that are full."""

from surefoot.prove.campaigns import kills, power
from surefoot.prove.outcome import Campaign

CAMPAIGNS: tuple[Campaign, ...] = (*kills.CAMPAIGNS, *power.CAMPAIGNS)
