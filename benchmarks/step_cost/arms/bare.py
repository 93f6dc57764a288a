"""The floor: forward, backward, fused update, nothing else. No clipping, no loss read."""

from __future__ import annotations

from torch.optim import AdamW

from benchmarks.step_cost.models import LEARNING_RATE, Workload, mean_loss
from benchmarks.step_cost.watch import Watch, main


def train(workload: Workload, watch: Watch, folder: str) -> None:
    model, batches = workload.model(), workload.batches()
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for step in range(watch.total):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        watch.tick(model, loss)


if __name__ == "__main__":
    main(train)
