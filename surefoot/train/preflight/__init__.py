"""What can be known to be wrong before a run: the contract is tried on a few samples, and nothing is written."""

from __future__ import annotations

from surefoot.core.errors import SpecError
from surefoot.train.assemble import Assembly
from surefoot.train.preflight import contract, draws, norms
from surefoot.train.record.compiling import eager
from surefoot.train.record.noticed.unheld import describe_task
from surefoot.train.resume.state import LiveState


def check(assembly: Assembly, *, is_again: bool = False) -> list[str]:
    """Try what the run is made of; gives notes, and adds to the warnings. Raises TaskError for what cannot be trained.

    What is only measured, to be told, the first attempt at a run has told: one that goes on (`is_again`) does not measure it anew.
    """
    offload = assembly.spec.memory.offload
    if offload != "none" and assembly.engine.device.type == "cpu":
        raise SpecError(
            f"memory.offload is {offload!r}, and the run is on a CPU: the device is the host already, and nothing would be gained",
            hint='leave it out; for less memory see memory.recompute, or optim.name = "sgd"',
        )
    LiveState(assembly).check()
    with eager(assembly.engine.compiled):  # what is tried here no step repeats
        notes = contract.check(assembly)
        measured = [] if is_again else norms.check(assembly)
        assembly.warnings.extend([*measured, *draws.check(assembly), *describe_task(assembly)])
    return notes
