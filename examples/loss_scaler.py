"""A loss scaler from first principles: why fp16 needs one, and all that it does.

No surefoot in it: read it, then use ours.

python examples/loss_scaler.py

fp16 keeps 11 bits of a number and no size below 6e-8. Gradients are often smaller than that, and
would become zero. So the loss is multiplied by a scale S, which by the chain rule multiplies every
gradient by S too, and before the update the gradients are divided by S again. How large S may be
nobody knows beforehand: it is tried. Where a gradient is no longer finite, S was too large: the
step is left out and S halves. After 2,000 steps without that it doubles. S is a power of two, so
that multiplying by it rounds nothing.

The order is the point: scale, backward of every microbatch with the same S, divide once, look
whether all is finite, clip, update, then move S. Clipping before dividing would clip S times too
hard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

EPOCHS, BATCH, MICROBATCH, CLIP = 8, 64, 32, 1.0


class Scaler:
    """S, and how many steps it has held."""

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale, self.growth_interval, self.clean_steps = scale, growth_interval, 0

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward() is called on."""
        return loss * self.scale

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> bool:
        """Divide, look, clip, update, move S; gives whether there was an update."""
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        is_finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        if is_finite:
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
        self._move(is_finite)
        return is_finite

    def _move(self, is_finite: bool) -> None:
        if not is_finite:
            self.scale, self.clean_steps = self.scale / 2, 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.scale, self.clean_steps = self.scale * 2, 0


def main() -> float:
    torch.manual_seed(0)
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images, is_test = pixels.float() / 16, torch.arange(len(labels)) % 5 == 0
    train, train_labels = images[~is_test], labels[~is_test]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # its weights stay fp32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.7)
    # too large at first, so that it has to come down
    scaler = Scaler(scale=2.0**24, growth_interval=100)

    for epoch in range(EPOCHS):
        for ids in torch.randperm(len(train)).split(BATCH):
            optimizer.zero_grad()
            for part in ids.split(MICROBATCH):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(
                        model(train[part]), train_labels[part], reduction="sum"
                    ) / len(ids)
                scaler.scaled(loss).backward()
            if not scaler.step(optimizer, clip=CLIP):
                power = torch.tensor(scaler.scale).log2()
                print(
                    f"epoch {epoch}: a gradient overflowed, the step is left out; "
                    f"S is now 2^{power:.0f}"
                )

    share = (model(images[is_test]).argmax(1) == labels[is_test]).float().mean().item()
    print(f"accuracy {share:.1%} with S = 2^{torch.tensor(scaler.scale).log2():.0f}")
    return share


if __name__ == "__main__":
    main()
