"""Lightning Fabric: the loop stays the user's.

Backward, clipping and the optimizer's step go through Fabric.
"""

from __future__ import annotations

from lightning.fabric import Fabric
from torch.optim import AdamW

from benchmarks.step_cost.models import CLIP, LEARNING_RATE, READ_EVERY, Workload, mean_loss
from benchmarks.step_cost.watch import Watch, main


def train(workload: Workload, watch: Watch, folder: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    plain, batches = workload.model(), workload.batches()
    model, optimizer = fabric.setup(plain, AdamW(plain.parameters(), lr=LEARNING_RATE, fused=True))
    losses = []
    for step in range(watch.total):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = mean_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        if step % READ_EVERY == 0:
            losses.append(loss.item())
        watch.tick(plain, loss)


if __name__ == "__main__":
    main(train, ("lightning",))
