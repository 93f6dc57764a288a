"""Hugging Face's Trainer: fused AdamW, a log every 50 steps, no progress bar, nothing saved."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.step_cost.endless import Endless
from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, Batch, Workload, mean_loss
from benchmarks.step_cost.watch import Watch, main


class WithLoss(nn.Module):
    """A model in the form the Trainer wants: keywords in, the loss first out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(inputs)
        return mean_loss(output, labels), output


class Named(IterableDataset[dict[str, Tensor]]):
    """Batches as dicts, made once."""

    def __init__(self, endless: Endless) -> None:
        self.batches = [{"inputs": x, "labels": y} for x, y in endless.batches]

    def __iter__(self) -> Any:
        while True:
            yield from self.batches


class Prebuilt(Trainer):
    def get_train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train_dataset, batch_size=None)


class Ticking(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.watch.tick(model.model, 0.0)


def train(workload: Workload, watch: Watch, folder: str) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=watch.total,
        per_device_train_batch_size=workload.batch,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=CLIP,
        logging_steps=READ_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
    )
    model = WithLoss(workload.model())
    Prebuilt(
        model=model,
        args=arguments,
        train_dataset=Named(Endless(workload)),
        callbacks=[Ticking(watch)],
    ).train()


if __name__ == "__main__":
    main(train, ("transformers", "accelerate"))
