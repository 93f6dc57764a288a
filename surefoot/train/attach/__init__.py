"""Record, time and save an existing training loop without changing it.

The records are those of a Run (`events.jsonl`: Started, Step, Committed, Ended), so that `surefoot
show` and `surefoot runs` read both. A restarted loop resumes from its newest undamaged checkpoint.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, final

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.train.attach.arguments import as_loss
from surefoot.train.attach.loop_session import LoopSession
from surefoot.train.attach.opening import LoopRequest, open_loop


def attach(
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data: Iterable[Any],
    folder: str | Path | None = None,
    every: int = 10,
    save: str | None = "10 min",
    state: Mapping[str, Any] | None = None,
) -> AttachedLoop:
    """Record a training loop in a run folder, and save and resume its state.

        run = surefoot.attach(model=model, optimizer=optimizer, data=loader, folder="runs/mine")
        for epoch in range(run.first_pass, 10):
            for batch in run.batches():
                ...  # your step, as it is
                run.step_done(loss)

    `batches()` yields the batches of one epoch of `data`. The run ends with `close()`, with the end
    of a `with` block (an exception is recorded), or with the process. If the same script is started
    again, it resumes in the middle of epoch `first_pass`. With torch.distributed, all ranks call
    `attach`, `batches`, `step_done`, `save` and `close`, with the same folder, which rank 0 writes.

    Args:
        model: The model.
        optimizer: The optimizer, or a list of optimizers; each must have `param_groups`.
        data: Any iterable of batches.
        folder: The run folder; None for a new one in runs/.
        every: Number of steps that one `step` record summarizes.
        save: Duration between two checkpoints, such as "10 min" or "500 steps"; None for no
            checkpoints. A checkpoint contains the model, the optimizers, the random states, the
            position in the data and `state`; `close` saves one too.
        state: Further objects to save, by name: objects with a state_dict, random generators, and
            tensors or arrays that the loop changes in place.

    Raises:
        DataError: If `data` is not iterable.
        TaskError: For an optimizer without `param_groups`, a model that is not a module, and a
            `state` that is not a mapping.
        RunFolderError: For a folder of a different kind.
        LostRank: If a rank does not call `attach`.
    """
    asked = LoopRequest(
        model=model,
        optimizer=optimizer,
        data=data,
        folder=None if folder is None else Path(folder),
        every=every,
        save=save,
        state=state,
    )
    return AttachedLoop(open_loop(asked, sys._getframe(1)))


@final
class AttachedLoop:
    """A recorded loop: `folder` is the run folder, `step` the number of steps in all attempts."""

    def __init__(self, session: LoopSession) -> None:
        self.session = session
        self._left = weakref.finalize(self, session.end, "stopped")
        # at exit, `end_with_process` checks first whether an exception ended the process
        self._left.atexit = False
        session.end_at_exit()

    @property
    def folder(self) -> Path:
        return self.session.folder()

    @property
    def step(self) -> int:
        return self.session.progress.step

    @property
    def first_pass(self) -> int:
        """Index, from 0, of the epoch in which this attempt starts; it may be partly done."""
        return self.session.first_pass

    @property
    def first_batch(self) -> int:
        """Index in its epoch of the first batch of the next `batches()`.

        It is 0 except after a resume in the middle of an epoch. A loop that counts batches uses
        `enumerate(run.batches(), run.first_batch)`.
        """
        return self.session.first_batch

    def save(self) -> None:
        """Save a checkpoint after a finished step; an epoch left by `break` counts as ended."""
        self.session.save()

    def batches(self, *, ahead: int | None = None) -> Iterator[Any]:
        """Yield the batches of one epoch, unchanged; after a restart, from the saved position.

        `ahead` is the number of batches that the loop reads ahead of the step it trains: for
        example 1 for a loop that checks whether a batch is the last one, or the depth of a
        prefetcher. After a restart, the batches that were read ahead are yielded again. Raises
        InputError if `ahead` is not a number of batches.
        """
        yield from self.session.batches(ahead)

    def step_done(self, loss: Tensor | float, *, num_samples: int | None = None) -> None:
        """Record an optimizer step; `loss` is a scalar, the mean over the step's samples.

        `num_samples` defaults to the samples read since the last step. Raises TaskError if `loss`
        is not a scalar.
        """
        if not self.session.telling.is_over_for("step_done()"):
            self.session.step_done(as_loss(loss), num_samples)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the `with` block as phase `name` of the step; time outside all phases is "other".

        Raises InputError for an unknown phase.
        """
        return self.session.phase(name)

    def close(self) -> None:
        """Save a checkpoint, as `save` does, and record that the loop has finished, once."""
        self.session.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.session.leave(error)
