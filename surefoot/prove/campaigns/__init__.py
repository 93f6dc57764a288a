"""Fault campaigns: real processes are killed, real files are damaged, real disks are full."""

from surefoot.prove.campaigns import failing, kills, ranks, rivals
from surefoot.prove.campaigns.files import damage, hostile
from surefoot.prove.campaigns.power import cut
from surefoot.prove.outcome import Campaign

CAMPAIGNS: tuple[Campaign, ...] = (
    *kills.CAMPAIGNS,
    *cut.CAMPAIGNS,
    *rivals.CAMPAIGNS,
    *damage.CAMPAIGNS,
    *hostile.CAMPAIGNS,
    *failing.CAMPAIGNS,
    *ranks.CAMPAIGNS,
)
