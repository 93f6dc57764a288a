"""Detect launchers whose variables surefoot does not read: srun, MPI, jsrun, Flux, PALS.

Such a launcher starts a command several times. Without the rank variables of torchrun, each of
these processes would train the whole task alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

JOINED = ("RANK", "WORLD_SIZE")  # set by torchrun and `--ranks`, and read by surefoot
# Slurm step ids from here on are not srun: batch script, interactive shell, external processes
LAST_STEP = 0xFFFF_FFF0


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Processes that a launcher started from one command.

    `number` is their number, None if unknown. `variable` is the environment variable by which they
    were detected. `num_hosts` is the number of hosts, None if unknown.
    """

    launcher: str
    number: int | None
    variable: str
    num_hosts: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    name: str
    size: str  # variable with the number of tasks
    # variable with the index of this task, without which `size` may be that of an allocation
    rank: str
    local_size: str = ""  # variable with the number of tasks on this host


LAUNCHERS = (
    _Launcher(
        name="mpirun",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        name="mpirun",
        size="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        name="jsrun",
        size="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    ),
    _Launcher(name="flux run", size="FLUX_JOB_SIZE", rank="FLUX_TASK_RANK"),
)
PROTOCOLS = (  # used by several launchers, including srun
    _Launcher(name="mpirun", size="PMI_SIZE", rank="PMI_RANK", local_size="MPI_LOCALNRANKS"),
    _Launcher(name="mpirun", size="MPI_LOCALNRANKS", rank="MPI_LOCALRANKID"),
    _Launcher(name="mpiexec", size="PALS_LOCAL_SIZE", rank="PALS_RANKID"),
)
# an index above 0 means that there are other tasks
RANKS_ALONE = (("PALS_RANKID", "mpiexec"), ("PMIX_RANK", "mpirun"), ("ALPS_APP_PE", "aprun"))


def find_tasks(environ: Mapping[str, str]) -> Tasks | None:
    """Return the processes that a launcher started, including this one.

    None if this process is the only one, or if RANK or WORLD_SIZE is set.

    >>> find_tasks({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}).number
    4
    >>> environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    >>> find_tasks({**environ, "RANK": "0", "WORLD_SIZE": "4"})
    """
    if any(environ.get(name) for name in JOINED):
        return None
    found = (
        _find_named(environ, LAUNCHERS)
        or _find_slurm_tasks(environ)
        or _find_named(environ, PROTOCOLS)
    )
    if found is None:
        alone = ((name, launcher) for name, launcher in RANKS_ALONE if _count(environ, name) > 0)
        found = next(
            (Tasks(launcher=launcher, number=None, variable=name) for name, launcher in alone), None
        )
    return found


def _find_named(environ: Mapping[str, str], launchers: Sequence[_Launcher]) -> Tasks | None:
    for each in launchers:
        number, local = _count(environ, each.size), _count(environ, each.local_size)
        if environ.get(each.rank) and number > 1:
            return Tasks(
                launcher=each.name,
                number=number,
                variable=each.size,
                num_hosts=-(-number // local) if local else None,
            )
    return None


def _find_slurm_tasks(environ: Mapping[str, str]) -> Tasks | None:
    """Return the tasks of the srun job step to which this process belongs.

    None in a batch script, in an interactive shell, and for a job step of one task.
    """
    if "SLURM_PROCID" not in environ:
        return None
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None and (environ.get("ENVIRONMENT") == "BATCH" or "SLURM_JOB_NODELIST" in environ):
        return None
    if step is not None and (not step.isdecimal() or int(step) >= LAST_STEP):
        return None
    variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    number = _count(environ, variable)
    hosts = _count(environ, "SLURM_STEP_NUM_NODES") or _count(environ, "SLURM_NNODES") or 1
    return (
        Tasks(launcher="srun", number=number, variable=variable, num_hosts=hosts)
        if number > 1
        else None
    )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def describe(tasks: Tasks) -> tuple[str, str]:
    """Return the error message for `tasks`, and a hint with the command line to use instead."""
    number = "several" if tasks.number is None else str(tasks.number)
    shown = (
        f" ({tasks.variable}={tasks.number})"
        if tasks.number is not None
        else f" ({tasks.variable} is set)"
    )
    message = (
        f"{tasks.launcher} started this command {number} times{shown}, "
        "and each process would train the whole task alone: "
        f"surefoot reads {' and '.join(JOINED)}, which are not set"
    )
    local = "N" if tasks.number is None else str(-(-tasks.number // (tasks.num_hosts or 1)))
    alone = "srun --ntasks=1 " if tasks.launcher == "srun" else ""
    one_host = f"{alone}surefoot train SPEC --ranks {local}"
    hosts = tasks.num_hosts or "H"
    each = {"srun": f"srun --ntasks={hosts} --ntasks-per-node=1 "}.get(
        tasks.launcher, "on each host: "
    )
    several = (
        f"{each}torchrun --nnodes={hosts} --nproc-per-node={local} --rdzv-backend=c10d "
        "--rdzv-endpoint=FIRST_HOST:29500 -m -- surefoot train SPEC"
    )
    line = (
        one_host
        if tasks.num_hosts == 1
        else several
        if tasks.num_hosts
        else f"on one host: {one_host}; on several, {several}"
    )
    apart = "for runs that are independent of each other set RANK=0 and WORLD_SIZE=1"
    return message, f"{line}; {apart} for each process"
