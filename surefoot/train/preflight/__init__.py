"""What can be known to be wrong before a run: the contract is tried on a few samples, and nothing is written."""

from __future__ import annotations

from surefoot.train.assemble import Assembly
from surefoot.train.preflight import contract, norms


def check(assembly: Assembly) -> list[str]:
    """Try what the run is made of; gives notes, and adds to those that are said. Raises TaskError for what cannot be trained."""
    notes = contract.check(assembly)
    assembly.told.extend(norms.check(assembly))
    return notes
