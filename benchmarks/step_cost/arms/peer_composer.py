"""MosaicML Composer's Trainer.

Fused AdamW, gradient clipping as its algorithm, no progress bar, nothing logged or saved.
"""

from __future__ import annotations

from typing import Any

from composer import Callback, ComposerModel, Trainer
from composer.algorithms import GradientClipping
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

from benchmarks.step_cost.endless import Endless
from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, Batch, Workload, mean_loss
from benchmarks.step_cost.watch import Watch, main


class Module(ComposerModel):  # type: ignore[misc]
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()

    def forward(self, batch: Batch) -> Tensor:
        output: Tensor = self.model(batch[0])
        return output

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return mean_loss(outputs, batch[1])


class Ticking(Callback):  # type: ignore[misc]
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.losses: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value % READ_EVERY == 0:
            self.losses.append(state.loss.item())
        self.watch.tick(state.model.model, state.loss)


def train(workload: Workload, watch: Watch, folder: str) -> None:
    model = Module(workload)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=CLIP)
    loader = DataLoader(Endless(workload), batch_size=None)
    Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=loader,
        max_duration=f"{watch.total}ba",
        algorithms=[clipping],
        callbacks=[Ticking(watch)],
        device="cpu",
        progress_bar=False,
        log_to_console=False,
        device_train_microbatch_size=workload.batch,
    ).fit()


if __name__ == "__main__":
    main(train, ("mosaicml",))
