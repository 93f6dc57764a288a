"""What a script that trains over a DataLoader with workers leaves behind.

Its own output, its exit code, and no process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 300

# trains, is left in the middle of an epoch, lets the run become garbage, and forks children that
# collect what they inherit
SCRIPT = """
import gc, multiprocessing, os, sys, threading, time
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot

WAY, LEFT, PERSISTENT, FOLDER = sys.argv[1:]
FORK = multiprocessing.get_context("fork")

def loader():
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data, stays = TensorDataset(rows, torch.arange(64) % 3), PERSISTENT == "persistent"
    return DataLoader(data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=stays)

class Mine:
    def model(self):
        return nn.Linear(4, 3)
    def data(self, split):
        return loader()
    def forward(self, model, batch):
        return model(batch[0])
    def loss(self, output, batch):
        labels = batch[1]
        loss = nn.functional.cross_entropy(output, labels, reduction="sum")
        return surefoot.Loss.sum(loss, len(labels))

def leave(step):
    if step == 5:
        names = [each.name[:7] for each in multiprocessing.active_children()]
        print(f"workers: {names.count('Process') >= 2}")
        if LEFT == "error":
            raise ValueError("mine")
        return LEFT == "break"

def train_by_run():
    train, observe = {"length": "9 steps", "device": "cpu"}, {"tensorboard": False}
    spec = surefoot.RunSpec(train=train, observe=observe)
    with surefoot.Run(spec, Mine(), folder=FOLDER, quiet=True) as run:
        for report in run.steps():
            if leave(report.step):
                break

def train_by_attach():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with surefoot.attach(model=model, optimizer=optimizer, data=loader(), folder=FOLDER) as run:
        for inputs, labels in run.batches():
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            if leave(run.step):
                break

def collect(number):
    gc.collect()
    return number

if __name__ == "__main__":
    gc.disable()
    torch.set_num_threads(1)
    failed = None
    try:
        train_by_run() if WAY == "Run" else train_by_attach()
    except ValueError as error:
        failed = error
    names = [each.name for each in multiprocessing.active_children()]
    print(f"left: {names}" if LEFT != "error" else "left by an error")
    del failed
    for _ in DataLoader(torch.arange(2), num_workers=1, worker_init_fn=collect):
        pass
    with FORK.Pool(1) as pool:
        print(pool.map(collect, range(2)))
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        print(list(pool.map(collect, range(2))))
    child = os.fork()
    if child == 0:
        gc.collect()
        sys.exit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    sys.exit(7)
"""


SLOW = pytest.mark.slow
MEMBERS = (
    pytest.param("Run", "end", "persistent", marks=SLOW),
    ("Run", "break", "anew"),
    pytest.param("Run", "error", "persistent", marks=SLOW),
    ("attach", "break", "persistent"),
    pytest.param("attach", "error", "anew", marks=SLOW),
)


@pytest.mark.quick("attach-break-persistent")
@pytest.mark.parametrize(("way", "left", "workers"), MEMBERS)
def test_nothing_but_a_script_s_own_output_comes_of_its_workers(
    way: str, left: str, workers: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), way, left, workers, str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment, timeout=DEADLINE_S
    )
    after = "left by an error" if left == "error" else "left: []"
    wanted = f"workers: True\n{after}\n[0, 1]\n[0, 1]\n4\n"
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == wanted
