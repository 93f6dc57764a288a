"""Arm, one variant of a measurement: a changed spec or any command, run in fresh processes."""

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
# message of a process with a spec that this task or this machine cannot run
REFUSED = "it is refused here"
_NAME = re.compile(r"[\w.+-][\w .+-]*")  # the name is also used for a folder


@contextmanager
def mark_refused_specs() -> Iterator[None]:
    """Return a context that marks the error of a spec that this machine cannot run.

    An InputError gets the prefix REFUSED in its message. A TaskError, the failure of a task, is not
    changed.
    """
    try:
        yield
    except TaskError:
        raise
    except InputError as error:
        raise InputError(f"{REFUSED}: {error.message}", hint=error.hint) from None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Variant of a measurement: its command and its environment.

    In `command`, these placeholders are replaced:

    - `{report}`: the file to which the process writes its report (`write_report`). Without it, only
      CPU time, wall time and peak memory of the processes are measured.
    - `{work}`: a folder of this process.
    - `{shared}`: a folder of all ranks of the arm.
    - `{started_s}`: the value of `time.perf_counter()` when the harness started the process. All
      processes of a Linux host have the same clock.
    - `{turns}`: the descriptor through which arms take turns (`surefoot.trial.turns`), or "alone".

    Args:
        name: Name of the variant.
        command: The command and its arguments.
        files: Texts by file name, which are first written into the folder of each process.
        folder: Working folder.
        variables: Variables that are added to the environment.
        threads: Number of threads of one operator.
        ranks: Number of processes; if there are several, each gets the variables that torchrun
            sets.
        timeout_s: Seconds after which the processes are killed.

    Raises:
        InputError: For an invalid command, name or count.
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
            raise InputError(
                f"the arm {self.name!r} has no command",
                hint="pass the command as a tuple, such as ('python', 'mine.py')",
            )
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"{self.name!r} is not a valid name of a variant",
                hint="use letters, digits, spaces and . _ + -",
            )
        if self.ranks < 1 or self.threads < 1 or not self.timeout_s > 0:
            given = (
                f"{self.ranks} ranks, {self.threads} threads and a time-out of {self.timeout_s} s"
            )
            raise InputError(f"the arm {self.name!r} cannot have {given}", hint="each is above 0")

    @property
    def reports(self) -> bool:
        """True if the command contains `{report}`, so that its process writes a report."""
        return any(REPORT in word for word in self.command)


def spec_arm(
    name: str,
    spec: RunSpec,
    *,
    steps: int,
    warmup: int = 10,
    capture: Sequence[int] = (),
    folder: Path = Path(),
    ranks: int | None = None,
    timeout_s: float = 600.0,
    whole_length: bool = False,
) -> Arm:
    """Return an arm that trains `spec` for `warmup` steps and then for `steps` measured ones.

    Example: `spec_arm("sgd", spec.replace(optim={"name": "sgd"}), steps=200)`. The arm reports:

    - of the measured steps: `cpu_s_per_step`, `wall_s_per_step`, `cpu_s_per_sample`,
      `wall_s_per_sample`, `num_steps`, `num_samples`, `items_per_sample` and `applied_share`;
    - `startup_s`, from the start of the process to the end of its first (compiled) step;
    - `loss` of the last step, `samples_per_epoch`, `peak_bytes`, `imported_bytes`, `compile_s` if
      code was compiled, and `device_peak_bytes` on a GPU.

    CPU seconds are the sum over all ranks; memory and `startup_s` are those of rank 0.

    Args:
        name: Name of the variant.
        spec: The spec.
        steps: Number of measured steps.
        warmup: Number of steps before the measured ones.
        capture: Steps after which loss, gradients and weights are stored for `compare_arms`.
        folder: Working folder.
        ranks: Number of ranks; None for that of `spec.layout`.
        timeout_s: Seconds after which the processes are killed.
        whole_length: Keep the run length of `spec`, which its schedule uses, and train only the
            beginning. Otherwise the length is `warmup` + `steps`.

    Raises:
        InputError: For invalid numbers of steps, or a spec without a task that can be imported.
    """
    if spec.task.use is None:
        raise SpecError(
            "an arm runs in a fresh process and needs a task that can be imported",
            hint="name one as [task] use",
        )
    if steps < 1 or warmup < 0 or any(not 1 <= step <= warmup + steps for step in capture):
        raise InputError(
            f"{warmup} warm-up steps, "
            f"{steps} measured steps and captures after steps {list(capture)} do not fit",
            hint="measure at least 1 step, and capture only after measured steps",
        )
    length = {} if whole_length else {"length": f"{warmup + steps} steps"}
    whole = spec.replace(train=length, **absolute(spec, folder))
    command = [
        sys.executable,
        "-m",
        "surefoot.trial.child",
        f"{WORK}/spec.toml",
        "--report",
        REPORT,
        "--run",
        f"{SHARED}/run",
        "--warmup",
        str(warmup),
        "--steps",
        str(steps),
        "--started",
        STARTED,
        "--turns",
        TURNS,
        *(word for step in capture for word in ("--capture", str(step))),
    ]
    return Arm(
        name=name,
        command=tuple(command),
        files={"spec.toml": spec_file.write(whole)},
        folder=folder,
        ranks=ranks or num_ranks(spec),
        threads=spec.train.threads or 1,
        timeout_s=timeout_s,
    )


def num_ranks(spec: RunSpec) -> int:
    """Return the number of ranks of `spec.layout`; `replicate` counts as 1 if it is not set."""
    return (spec.layout.replicate or 1) * spec.layout.shard


def absolute(spec: RunSpec, folder: Path) -> dict[str, dict[str, str]]:
    """Return the tables of `spec` that contain paths, with the paths made absolute.

    Relative paths start from `folder`. The spec file is written to the arm's folder, where they
    would lead elsewhere.
    """
    tables: dict[str, dict[str, str]] = {}
    file, colon, kind = (spec.task.use or "").partition(":")
    if colon and file.endswith(".py"):
        tables["task"] = {"use": f"{(folder / Path(file).expanduser()).resolve()}:{kind}"}
    if spec.data.folder is not None:
        tables["data"] = {"folder": str((folder / Path(spec.data.folder).expanduser()).resolve())}
    return tables
