"""Tests of launchers whose variables do not join ranks.

Several tasks are refused with the line to type, one process is not.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.core.errors import InputError
from surefoot.core.place import child_environment
from surefoot.core.process.launchers import describe, find_tasks
from tests.cli.forked_commands import run_forked

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
BATCH = {**STEP, "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH", "SLURM_SUBMIT_DIR": "/home/me"}
SEVERAL: Mapping[str, tuple[dict[str, str], str, int | None]] = {
    "srun": (
        {**STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
        "srun",
        2,
    ),
    "srun in a batch script": (
        {**BATCH, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4"},
        "srun",
        4,
    ),
    "srun whose variables are passed in part": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        "srun",
        2,
    ),
    "mpirun of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun", 4),
    "mpirun in a batch script": (
        {**BATCH, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        "mpirun",
        4,
    ),
    "MPICH": ({"PMI_SIZE": "3", "PMI_RANK": "0", "PMI_FD": "7"}, "mpirun", 3),
    "Intel MPI": ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, "mpirun", 2),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, "mpirun", 2),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0"}, "jsrun", 6),
    "Flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, "flux run", 2),
    "PALS": ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1"}, "mpiexec", None),
    "PMIx": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "mpirun", None),
}
ALONE = {
    "no launcher": {},
    "a step of one task": {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a batch script with 8 tasks": BATCH,
    "a batch step by number": {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)},
    "the shell of salloc": {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NODELIST": "node1",
    },
    "an interactive step": {
        **STEP,
        "SLURM_NTASKS": "8",
        "SLURM_STEP_ID": str(0xFFFFFFFA),
        "SLURM_STEP_NUM_TASKS": "1",
    },
    "a job of one task": {**STEP, "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "torchrun in srun": {**SEVERAL["srun"][0], "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
    "independent runs": {**SEVERAL["srun"][0], "RANK": "0", "WORLD_SIZE": "1"},
    "a size without a rank": {"PMI_SIZE": "4", "FLUX_JOB_SIZE": "4"},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_tasks_are_found_and_told_with_the_line_to_type(name: str) -> None:
    variables, launcher, number = SEVERAL[name]
    found = find_tasks(variables)
    assert found is not None
    assert (found.launcher, found.number) == (launcher, number)
    message, line = describe(found)
    assert message.startswith(
        f"{launcher} started this command {number or 'several'} times ({found.variable}"
    )
    assert f"surefoot train SPEC --ranks {number or 'N'}" in line
    assert "set RANK=0 and WORLD_SIZE=1" in line


@pytest.mark.parametrize("name", ALONE)
def test_one_process_is_not_taken_for_several(name: str) -> None:
    assert find_tasks(ALONE[name]) is None


def test_tasks_on_several_hosts_are_to_start_one_torchrun_a_host() -> None:
    found = find_tasks(
        {**STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "4"}
    )
    assert found is not None
    assert describe(found)[1].startswith(
        "srun --ntasks=4 --ntasks-per-node=1 torchrun --nnodes=4 --nproc-per-node=4 "
    )


TRAIN = (
    "train",
    "digits",
    "--steps",
    "2",
    "--set",
    "schedule.warmup=1 steps",
    "--quiet",
    "--json",
    "--run",
    "run",
)


@pytest.mark.parametrize("more", [(), ("--ranks", "2")], ids=["one process", "--ranks"])
def test_train_refuses_to_be_one_of_several_tasks_and_writes_nothing(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_forked(*TRAIN, *more, folder=tmp_path, variables=SEVERAL["srun"][0])
    assert done.returncode == 2, done.stderr
    assert "srun started this command 2 times (SLURM_STEP_NUM_TASKS=2)" in done.stderr
    assert "hint: srun --ntasks=1 surefoot train digits --ranks 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_attach_refuses_unless_the_loop_has_joined_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1, 1)
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "data": [torch.ones(1, 1)],
        "folder": tmp_path / "run",
    }
    for name, value in SEVERAL["mpirun of Open MPI"][0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="mpirun started this command 4 times"):
        surefoot.attach(**given)  # type: ignore[arg-type]
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        surefoot.attach(**given).close()  # type: ignore[arg-type]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["independent runs", "a batch script with 8 tasks"])
def test_what_is_one_process_trains(name: str, tmp_path: Path) -> None:
    done = run_forked(*TRAIN, folder=tmp_path, variables=ALONE[name])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 2


@pytest.mark.slow  # imports torch in three processes
def test_the_line_for_several_hosts_trains_as_it_is_typed(tmp_path: Path) -> None:
    found = find_tasks(
        {**SEVERAL["srun"][0], "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4"}
    )
    assert found is not None
    line = (
        describe(found)[1]
        .partition(";")[0]
        .partition("--ntasks-per-node=1 ")[2]
        .partition(" surefoot ")[0]
    )
    # one host of the two
    line = line.replace("--nnodes=2", "--nnodes=1").replace("FIRST_HOST:29500", "127.0.0.1:0")
    words = shlex.split(
        line.replace("torchrun", f"{shlex.quote(sys.executable)} -m torch.distributed.run", 1)
    )
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        **SEVERAL["srun"][0],
    }
    done = subprocess.run(
        [*words, "surefoot", *TRAIN],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
