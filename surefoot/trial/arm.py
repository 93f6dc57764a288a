"""An arm: what one side of a comparison runs, always in fresh processes. A spec with a change, or any command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError, TaskError

REPORT, WORK, SHARED, STARTED, TURNS = "{report}", "{work}", "{shared}", "{started_s}", "{turns}"
REFUSED = "it is refused here"  # what a process says whose spec this task, or this machine, cannot run
_NAME = re.compile(r"[\w.+-][\w .+-]*")  # a name is also a folder


@contextmanager
def told_apart() -> Iterator[None]:
    """What a process of an arm runs inside, so that a spec that cannot run here is told apart from a task that fails: REFUSED."""
    try:
        yield
    except TaskError:
        raise
    except InputError as error:
        raise InputError(f"{REFUSED}: {error.message}", hint=error.hint) from None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A command with all that it runs under. Raises InputError for a command, name or count that cannot be.

    In `command`, `{report}` is the file that the process reports to (`write_report`), `{work}` a folder of its own, `{shared}` one of all
    ranks, and
    `{started_s}` the harness's `time.perf_counter()` at its start, one clock for all processes of a Linux host, `{turns}` the channel of
    `surefoot.trial.turns`, or "alone". A command without
    `{report}` is measured from outside only. `files` are written into the folder first. `folder` is the working folder,
    `variables` are added to the environment, `threads` those of one operator. With `ranks` above 1 one process is
    started for each, with torchrun's variables.
    """

    name: str
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    ranks: int = 1
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.command:
            raise InputError(f"the arm {self.name!r} has no command", hint="give the words of one, as in ('python', 'mine.py')")
        if not _NAME.fullmatch(self.name):
            raise InputError(f"{self.name!r} is no name for an arm", hint="use letters, digits, spaces and . _ + -")
        if self.ranks < 1 or self.threads < 1 or not self.timeout_s > 0:
            given = f"{self.ranks} ranks, {self.threads} threads and a time-out of {self.timeout_s} s"
            raise InputError(f"the arm {self.name!r} cannot have {given}", hint="each is above 0")

    @property
    def reports(self) -> bool:
        """Whether its process writes a report of its own."""
        return any(REPORT in word for word in self.command)


def spec_arm(
    name: str, spec: RunSpec, *, steps: int, warmup: int = 10, capture: Sequence[int] = (), folder: Path = Path(),
    ranks: int | None = None, timeout_s: float = 600.0, whole_length: bool = False,
) -> Arm:  # fmt: skip
    """An arm that trains `spec` for `warmup` steps and then for `steps` measured ones.

    That is then the run's length, and its schedule follows it; with `whole_length` it is the beginning of a run as long as `spec` says.

    It reports `cpu_s_per_step` and `wall_s_per_step` of the measured steps, the same `_per_sample`, `num_steps`, `num_samples`,
    `items_per_sample` and `applied_share` (what was done for them), `startup_s` (from the start of the process to the end of its first
    step, or of the first that is compiled), `samples_per_epoch`, `loss` (of the last step), `peak_bytes`, `imported_bytes`, `compile_s`
    where code was compiled, and `device_peak_bytes` on a GPU; with `capture`, also loss, gradients and weights after those steps, for
    `compare_arms`. The ranks are those of `spec.layout`; then CPU seconds are of all of them, memory and `startup_s` of rank 0.
    A change is `spec_arm("sgd", spec.replace(optim={"name": "sgd"}), steps=200)`.

    Raises SpecError for a spec without an importable task, InputError for no steps.
    """
    if spec.task.use is None:
        raise SpecError("an arm runs in a fresh process and needs a task that can be imported", hint="name one as [task] use")
    if steps < 1 or warmup < 0 or any(not 1 <= step <= warmup + steps for step in capture):
        raise InputError(
            f"{warmup} warm-up steps, {steps} measured ones and captures after {list(capture)} do not fit",
            hint="measure 1 step or more, capture within them",
        )
    length = {} if whole_length else {"length": f"{warmup + steps} steps"}
    whole = spec.replace(train=length, **absolute(spec, folder))
    command = [
        sys.executable, "-m", "surefoot.trial.child", f"{WORK}/spec.toml", "--report", REPORT, "--run", f"{SHARED}/run",
        "--warmup", str(warmup), "--steps", str(steps), "--started", STARTED, "--turns", TURNS,
        *(word for step in capture for word in ("--capture", str(step))),
    ]  # fmt: skip
    return Arm(
        name=name, command=tuple(command), files={"spec.toml": spec_file.write(whole)}, folder=folder, ranks=ranks or num_ranks(spec),
        threads=spec.train.threads or 1, timeout_s=timeout_s,
    )  # fmt: skip


def num_ranks(spec: RunSpec) -> int:
    """The ranks that `spec.layout` asks for: one for an open `replicate`."""
    return (spec.layout.replicate or 1) * spec.layout.shard


def absolute(spec: RunSpec, folder: Path) -> dict[str, dict[str, str]]:
    """The tables whose paths would mean something else to a spec file in the arm's own folder."""
    tables: dict[str, dict[str, str]] = {}
    file, colon, kind = (spec.task.use or "").partition(":")
    if colon and file.endswith(".py"):
        tables["task"] = {"use": f"{(folder / Path(file).expanduser()).resolve()}:{kind}"}
    if spec.data.folder is not None:
        tables["data"] = {"folder": str((folder / Path(spec.data.folder).expanduser()).resolve())}
    return tables
