"""Ladder: experiments that add one optimization (a rung) at a time to a plain training loop.

Each experiment measures the gain on this machine, and checks that the results stay the same.
"""

from surefoot.prove.ladder.climb import Ladder, RungResult, climb_ladder
from surefoot.prove.ladder.compiled import verify_compiled
from surefoot.prove.ladder.rows import BEST, HEADER, as_markdown, as_row, as_svg, as_toml, cells
from surefoot.prove.ladder.rungs import PLAIN, Rung, find_rungs, parse_rung
from surefoot.prove.ladder.workbench import LadderSettings

__all__ = [
    "BEST",
    "HEADER",
    "PLAIN",
    "Ladder",
    "RungResult",
    "Rung",
    "LadderSettings",
    "as_markdown",
    "as_row",
    "as_svg",
    "as_toml",
    "cells",
    "climb_ladder",
    "find_rungs",
    "parse_rung",
    "verify_compiled",
]
