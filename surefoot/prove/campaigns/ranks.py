"""Runs of several ranks under surefoot's supervisor, with faults.

Ranks are killed, stopped, or given non-finite values, and runs resume with fewer or more ranks.
Each trial runs the command that a user types, with its real processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor, nn

from surefoot.components.checkpoint import Commit
from surefoot.contract import events, manifest, spec_file
from surefoot.contract.events import Fault
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.control.launch.decide import IN_VAIN
from surefoot.core import place
from surefoot.core.errors import EXIT_OK, TaskError
from surefoot.prove.campaigns.probe import SAMPLES, Probe
from surefoot.prove.campaigns.workshop import (
    KILLED,
    LOOK_S,
    PATIENCE_S,
    Workshop,
    read_consumed,
    read_losses,
)
from surefoot.prove.outcome import Campaign, TrialResult

STEPS, EVERY, BATCH = 40, 4, 8
PIECES = 4  # pieces of each batch, summed in one order: bitwise identical on 1, 2 and 4 ranks
SIZES = (1, 2, 4)
STALL_S, NAMED_S, GONE_S = 1.0, 6.0, 10.0
LATER_S = 0.1  # longest wait after a checkpoint
RESTARTS = 3
RANK = "surefoot:"  # prefix of the process name of a rank, before its number
# random states, which differ between ranks: each rank draws for its pieces alone
OWN = "state/random/"
KINDS = ("loss", "gradient", "buffer")
TASK = f"{__name__}:Spoiled"
NOTHING: Mapping[str, Any] = {}


class Spoiled(Probe):
    """The probe with one fault on rank `guilty`, in its forward pass number `at`.

    `kind` is what becomes non-finite: a loss, the gradient of the output, a buffer of BatchNorm; or
    "dead": the rank kills itself. Independently, `sample` of the data holds `value` from the start.
    """

    def __init__(
        self, kind: str = "", guilty: int = 0, at: int = 0, sample: int = -1, value: str = "nan"
    ) -> None:
        super().__init__(poison=((sample, float(value)),) if sample >= 0 else ())
        self._kind, self._guilty, self._left = kind, guilty, at

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        is_now = False
        if torch.is_grad_enabled() and self._kind and place.here().rank == self._guilty:
            is_now, self._left = self._left == 1, self._left - 1
        if is_now and self._kind == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_now and self._kind == "buffer":
            model.get_buffer("1.running_var")[3] = math.nan
        output = super().forward(model, batch)
        if is_now and self._kind == "gradient":
            output.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        self._is_loss = is_now and self._kind == "loss"
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        found = super().loss(output, batch)
        if not self._is_loss:
            return found
        self._is_loss = False
        return Loss.sum(found.terms[0].total * math.nan, found.terms[0].count)


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as far as ranks must agree.

    It holds the digests of its tensors, the samples of each step, and its losses.
    """

    tensors: dict[str, str]
    consumed: list[tuple[int, int]]
    losses: dict[int, str]


class Command:
    """`surefoot train` on some ranks, in a new session; leaving the context kills the processes."""

    def __init__(self, spec: Path, run: Path, ranks: int, *, restarts: int = RESTARTS) -> None:
        self.ranks, self.run = ranks, run
        self._said = spec.with_name(f"said-{time.monotonic_ns()}")
        several = ["--ranks", str(ranks), "--max-restarts", str(restarts)] if ranks > 1 else []
        train = [sys.executable, "-m", "surefoot", "train"]
        with self._said.open("wb") as said:
            self._process = psutil.Popen(
                [*train, str(spec), "--run", str(run), "--quiet", *several],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=place.child_environment(threads=1),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in (*self.find_ranks().values(), self._process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()

    @property
    def said(self) -> str:
        """Text that the command wrote to standard error."""
        return self._said.read_text(errors="replace")

    def wait(self) -> int:
        """Return the exit code of the command, below 0 for a signal.

        Raises TaskError where the command takes too long.
        """
        try:
            return int(self._process.wait(PATIENCE_S))
        except psutil.TimeoutExpired:
            raise TaskError(
                f"a run of {self.ranks} ranks hung: {self.said[-500:]}",
                hint="this is a fault of surefoot",
            ) from None

    def kill(self) -> int:
        """Send SIGKILL to the supervisor alone; return its exit code."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
        return self.wait()

    def find_ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the started ranks; a single rank is the command itself."""
        found: dict[int, psutil.Process] = {0: self._process} if self.ranks == 1 else {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in self._process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if each.name().startswith(RANK):
                        found[int(each.name().removeprefix(RANK))] = each
        return found

    def wait_for(self, what: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        """Wait until `what` is true; return False if the command ends first or at a timeout."""
        until_s = time.monotonic() + patience_s
        while not (is_so := what()) and self._process.poll() is None and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        return is_so

    def comes_to(self, step: int, draws: random.Random) -> bool:
        """Wait for the checkpoint of `step` (0: the start of all ranks), and a moment longer.

        Return False if the command ended before.
        """
        came = self.wait_for(
            lambda: (
                len(self.find_ranks()) == self.ranks
                if step == 0
                else max(manifest.steps(self.run), default=0) >= step
            )
        )
        time.sleep(draws.uniform(0.0, LATER_S))
        return came and self._process.poll() is None


def write_spec(folder: Path, given: Mapping[str, Any] = NOTHING, *, is_exact: bool = True) -> Path:
    """Write the spec of a trial, with the arguments of its task.

    With `is_exact` results are bitwise identical on any number of ranks.
    """
    spec = RunSpec.model_validate(
        {
            "task": {"use": TASK, **given},
            "data": {"last_batch": "drop"},
            "train": {
                "length": f"{STEPS} steps",
                "batch": BATCH,
                "microbatch": BATCH // PIECES,
                "threads": 1,
            },
            "layout": {"hang_timeout": STALL_S, **({"virtual_ranks": PIECES} if is_exact else {})},
            "stability": {"max_skips": STEPS},
            "evaluate": {"every": "9 epochs"},
            "checkpoint": {"every": f"{EVERY} steps", "background": False},
            "observe": {"every": "1 step", "tensorboard": False},
        }
    )
    path = folder / "spec.toml"
    path.write_text(spec_file.write(spec))
    return path


def look(run: Path) -> RunEnd:
    """Return how a run ended. Raises RunFolderError where it has no checkpoint of the last step."""
    tensors = {
        name: sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in Commit(run, STEPS).read("").items()
        if not name.startswith(OWN)
    }
    losses = {step: repr(loss) for step, loss in read_losses(run).items()}
    return RunEnd(tensors, read_consumed(run), losses)


def find_golden(workshop: Workshop, given: Mapping[str, Any] = NOTHING) -> RunEnd:
    """Return the end of the uninterrupted run of one process, made once per task arguments."""

    def run() -> RunEnd:
        with (
            workshop.scratch("one") as folder,
            Command(write_spec(folder, given), folder / "run", 1) as one,
        ):
            if code := one.wait():
                raise TaskError(
                    f"the unbroken run ended with {code}: {one.said[-500:]}",
                    hint="this is a fault of surefoot",
                )
            return look(folder / "run")

    return workshop.once(("one process", *given.items()), run)


def judge(command: Command, golden: RunEnd) -> str | None:
    """Return what is wrong with a run at its end; None if it ended as the uninterrupted one."""
    if code := command.wait():
        return f"it ended with {code}: {command.said[-500:]}"
    if STEPS not in (steps := manifest.steps(command.run)):
        return f"its last commit is that of step {max(steps, default=0)}"
    found = look(command.run)
    wrong = [name for name, value in vars(golden).items() if value != getattr(found, name)]
    return f"its {' and '.join(wrong)} are not those of the unbroken run" if wrong else None


def _moments(draws: random.Random, number: int) -> list[int]:
    """Return steps after whose checkpoints something happens; the first may be 0, before step 1."""
    return sorted(draws.sample(range(0, STEPS - EVERY, EVERY), number))


def change_size(workshop: Workshop, seed: int) -> TrialResult:
    """Interrupt three attempts with 1, 2 or 4 ranks, then train a fourth to its end.

    Each is interrupted by a kill of a rank or of the supervisor.
    """
    draws = random.Random(seed)
    golden, sizes, fell = find_golden(workshop), list[int](), 0
    with workshop.scratch("sizes") as folder:
        spec, run = write_spec(folder), folder / "run"
        for step in (*_moments(draws, 3), None):
            sizes.append(draws.choice([each for each in SIZES if each not in sizes[-1:]]))
            with Command(spec, run, sizes[-1], restarts=RESTARTS if step is None else 0) as command:
                if step is None:
                    wrong = judge(command, golden)
                elif command.comes_to(step, draws):
                    there = command.find_ranks()
                    if there and draws.random() < 0.5:
                        there[draws.choice(sorted(there))].kill()
                        command.wait()
                    else:
                        command.kill()
                    fell += 1
    return TrialResult(
        wrong and f"ranks {sizes}: {wrong}",
        (f"{fell} kills", f"at last {sizes[-1]}"),
        fell=fell > 0,
    )


def poison_a_sample(workshop: Workshop, seed: int) -> TrialResult:
    """Make a value of one sample non-finite.

    All ranks must skip every step with that sample, as one process does.
    """
    draws = random.Random(seed)
    given: dict[str, Any] = {"sample": draws.randrange(SAMPLES)}
    given["value"] = draws.choice(("nan", "inf", "-inf"))
    ranks = draws.choice(SIZES[1:])
    golden = find_golden(workshop, given)
    with (
        workshop.scratch("poison") as folder,
        Command(write_spec(folder, given), folder / "run", ranks) as command,
    ):
        wrong = (
            judge(command, golden)
            or find_poison(command.run)
            or (None if _skipped(command.run) else "no step was skipped")
        )
    return TrialResult(
        wrong and f"{given}, {ranks} ranks: {wrong}", (str(given["value"]), f"{ranks} ranks")
    )


def poison_a_step(workshop: Workshop, seed: int) -> TrialResult:
    """Make a loss, a gradient or a buffer non-finite, once, on one rank.

    All ranks must skip that step; a buffer that stays non-finite must end the run and be reported.
    """
    draws = random.Random(seed)
    kind, ranks = KINDS[seed % len(KINDS)], draws.choice(SIZES[1:])
    guilty, at = draws.randrange(ranks), draws.randint(16, STEPS - 2)
    given: dict[str, Any] = {"kind": kind, "guilty": guilty, "at": at}
    with workshop.scratch("poison") as folder:
        with Command(write_spec(folder, given, is_exact=False), folder / "run", ranks) as command:
            code, said = command.wait(), command.said
        wrong, num_skipped = find_poison(folder / "run"), len(_skipped(folder / "run"))
        is_well = (
            code != EXIT_OK and "not finite" in said
            if kind == "buffer"
            else code == EXIT_OK and num_skipped == 1
        )
        if wrong is None and not is_well:
            wrong = f"it ended with {code} and skipped {num_skipped} steps: {said[-300:]}"
    return TrialResult(
        wrong and f"{kind} of rank {guilty} of {ranks}: {wrong}", (kind, f"{ranks} ranks")
    )


def find_poison(run: Path) -> str | None:
    """Return a message for a checkpoint that holds a non-finite value, or None."""
    for step in manifest.steps(run):
        for name, tensor in Commit(run, step).read("").items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{name} of the commit of step {step} is not finite"
    return None


def _skipped(run: Path) -> list[int]:
    """Return the steps that the log records as skipped."""
    return [
        each.step
        for each in events.newest(events.read(run))
        if isinstance(each, Fault) and each.fault == "nonfinite"
    ]


def stop_a_rank(workshop: Workshop, seed: int) -> TrialResult:
    """Send SIGSTOP to a rank at any time.

    The rank must be named in time; all ranks must restart by themselves and end as the
    uninterrupted run.
    """
    draws = random.Random(seed)
    golden, ranks, (step,) = find_golden(workshop), draws.choice(SIZES[1:]), _moments(draws, 1)
    with (
        workshop.scratch("stop") as folder,
        Command(write_spec(folder), folder / "run", ranks) as command,
    ):
        there = command.find_ranks() if command.comes_to(step, draws) else {}
        victim = draws.choice(sorted(there)) if there else 0
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            there[victim].suspend()
        is_named = command.wait_for(
            lambda: f"rank {victim} of {ranks}" in command.said, STALL_S + NAMED_S
        )
        if not is_named and manifest.steps(command.run)[-1:] == [STEPS]:
            return TrialResult(fell=False)  # the run ended before the signal
        wrong = (
            judge(command, golden)
            if is_named
            else f"it was not named in {STALL_S + NAMED_S:.0f} s: {command.said[-500:]}"
        )
    told = f"rank {victim} of {ranks} stopped after step {step}"
    return TrialResult(
        wrong and f"{told}: {wrong}", (f"{ranks} ranks", "later" if step else "first steps")
    )


def kill_the_supervisor(workshop: Workshop, seed: int) -> TrialResult:
    """Send SIGKILL to the supervisor.

    No rank may be left, and the same command, run at once, must end as the uninterrupted run.
    """
    draws = random.Random(seed)
    golden, ranks, (step,) = find_golden(workshop), draws.choice(SIZES[1:]), _moments(draws, 1)
    with workshop.scratch("orphans") as folder:
        spec, run = write_spec(folder), folder / "run"
        with Command(spec, run, ranks) as command:
            came = command.comes_to(step, draws)
            there = list(command.find_ranks().values())
            fell = command.kill() == KILLED and came
        with Command(spec, run, ranks) as again:
            again.wait_for(lambda: not _alive(there), GONE_S)
            for each in (left := _alive(there)):
                each.kill()
            wrong = (
                f"after {GONE_S:.0f} s {len(left)} ranks are left" if left else judge(again, golden)
            )
    return TrialResult(
        wrong and f"{ranks} ranks, after step {step}: {wrong}", (f"{ranks} ranks",), fell=fell
    )


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]


def kill_each_attempt(workshop: Workshop, seed: int) -> TrialResult:
    """Kill a rank before every checkpoint.

    After several restarts without a new checkpoint the run must end and say why.
    """
    draws = random.Random(seed)
    ranks = draws.choice((2, 3))
    guilty, at = draws.randrange(ranks), draws.randint(1, EVERY)
    given: dict[str, Any] = {"kind": "dead", "guilty": guilty, "at": at}
    with (
        workshop.scratch("again") as folder,
        Command(write_spec(folder, given, is_exact=False), folder / "run", ranks) as command,
    ):
        code, said = command.wait(), command.said
    anew = said.count(" ranks restart, ")
    is_well = code != EXIT_OK and anew == RESTARTS and IN_VAIN in said
    wrong = (
        f"rank {guilty} of {ranks}: it restarted {anew} times and ended with {code}: {said[-300:]}"
    )
    return TrialResult(None if is_well else wrong, (f"{ranks} ranks",))


def missing() -> str | None:
    """Return why ranks cannot be found by their process name on this machine, or None."""
    if sys.platform.startswith("linux"):
        return None
    return "it needs Linux, where the process name contains the rank"


CAMPAIGNS = (
    Campaign(
        case="F26",
        title="runs of 1, 2 and 4 ranks, killed and resumed on a different number of ranks",
        trial=change_size,
        few=3,
        missing=missing,
    ),
    Campaign(
        case="F12",
        title="NaN or infinity in one sample, on 2 and 4 ranks",
        trial=poison_a_sample,
        few=4,
    ),
    Campaign(
        case="F13",
        title="NaN or infinity in a loss, a gradient or a BatchNorm buffer of one rank",
        trial=poison_a_step,
        few=3,
    ),
    Campaign(
        case="F20",
        title="SIGSTOP of one of 2 or 4 ranks at any time",
        trial=stop_a_rank,
        few=3,
        missing=missing,
    ),
    Campaign(
        case="F23",
        title="kill -9 of the supervisor of 2 or 4 ranks",
        trial=kill_the_supervisor,
        few=3,
        missing=missing,
    ),
    Campaign(
        case="F01-loop",
        title="a rank that is killed before every commit",
        trial=kill_each_attempt,
        few=2,
    ),
)
