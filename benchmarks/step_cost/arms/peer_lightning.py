"""Lightning's Trainer, as lean as it goes.

No logger, no progress bar, no checkpoints, no validation.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

from benchmarks.step_cost.endless import Endless
from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, Batch, Workload, mean_loss
from benchmarks.step_cost.watch import Watch, main


class Module(lightning.LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()
        self.losses: list[float] = []

    def training_step(self, batch: Batch, number: int) -> Tensor:
        loss = mean_loss(self.model(batch[0]), batch[1])
        if number % READ_EVERY == 0:
            self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)


class Ticking(lightning.Callback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.watch.tick(pl_module.model, outputs["loss"])


def train(workload: Workload, watch: Watch, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=watch.total,
        gradient_clip_val=CLIP,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Ticking(watch)],
        default_root_dir=folder,
    )
    trainer.fit(Module(workload), DataLoader(Endless(workload), batch_size=None))


if __name__ == "__main__":
    main(train, ("lightning",))
