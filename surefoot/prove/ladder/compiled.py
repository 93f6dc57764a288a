"""Comparison of a compiled step with eager mode by the ladder's parity gate, tensor by tensor.

Both start from the same batches and states. If a value lies on an edge, such as two equal inputs of
a maximum, the last bit decides between two gradients, and no bound on rounding covers the
difference. Therefore both start each time from the same bits, so that simulated rounding meets the
same edges. Several draws of simulated rounding give the allowed difference. For fp32 they are up to
four units, since a compiled sum has a different order.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.contract.spec import RunSpec, key_names
from surefoot.core.errors import SpecError, TaskError
from surefoot.prove.ladder import gate, rungs
from surefoot.prove.ladder.gate import GateVerdict
from surefoot.prove.ladder.workbench import LadderSettings, Tell, Workbench
from surefoot.trial import check_finite

# units per draw; with fewer bits a compiled step rounds less often than eager mode does
UNITS = {"fp32": (1, 2, 4, 4)}
FLOOR = "floor/"


def verify_compiled(spec: RunSpec, folder: Path, *, tell: Tell) -> tuple[RunSpec, GateVerdict]:
    """Compare `spec` compiled with `spec` in eager mode; return the compiled spec and the verdict.

    If the spec compiles nothing, the whole model is compiled. A part that cannot be compiled is an
    error, since it would be compared with itself.

    Raises:
        SpecError: If the spec names no task.
        TaskError: If one of the two does not run.
    """
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task, so fresh processes cannot build it",
            hint='name it: [task] use = "my_task.py:MyTask"',
        )
    what = "model" if spec.compile.what == "none" else spec.compile.what
    compiled = rungs.change(spec, {"compile.what": what, "compile.on_failure": "stop"})
    eager = rungs.change(spec, {f"compile.{key}": None for key in key_names("compile")})
    compute = spec.precision.compute
    unit = gate.unit_of(compute)
    bench = Workbench(eager, LadderSettings(), folder)
    tell("eager mode, and what rounding makes of it")
    found = _states(
        bench, "eager mode", eager, tuple(unit * times for times in UNITS.get(compute, (1, 1, 1)))
    )
    start = {name: array for name, array in found.items() if not name.startswith(FLOOR)}
    floor = {
        name.removeprefix(FLOOR): array for name, array in found.items() if name.startswith(FLOOR)
    }
    check_finite(start, "eager mode")
    tell(f"compiled: {what}")
    return compiled, gate.judge("nothing", start, floor, _states(bench, "compiled", compiled))


def _states(
    bench: Workbench, name: str, spec: RunSpec, units: tuple[float, ...] = ()
) -> gate.Arrays:
    try:
        return bench.states(name, spec, units=units)
    except TaskError as error:
        raise TaskError(
            f"{name}: {error.message}", hint="check that surefoot train SPEC runs with this setting"
        ) from error
