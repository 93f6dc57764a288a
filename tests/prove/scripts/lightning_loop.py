"""Lightning as its documents say: a checkpoint every few steps, `ckpt_path="last"` to resume.

python lightning_loop.py out mid|epoch      saves inside epochs, or at their ends
"""

import logging
import sys
import warnings

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(out: str, when: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    seed_everything(0)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=8, shuffle=True)
    often = (
        {"every_n_train_steps": 5}
        if when == "mid"
        else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    )
    saving = ModelCheckpoint(dirpath=out, filename="newest", save_last=True, **often)
    trainer = Trainer(
        max_epochs=8,
        callbacks=[saving],
        logger=False,
        accelerator="cpu",
        default_root_dir=out,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader, ckpt_path="last")
    torch.save(model.state_dict(), f"{out}/final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
