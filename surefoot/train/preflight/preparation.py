"""Preparation of a run on a rank: its task, its folder and its parts; nothing is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask
from surefoot.runtime.comm.mesh import Mesh
from surefoot.train import environment, folder, preflight
from surefoot.train.assemble import Assembly, assemble, take_task
from surefoot.train.folder import Chosen, RunFolderRequest
from surefoot.train.resume.program import Program
from surefoot.train.resume.start import check_as_stated


class PreparedRun(NamedTuple):
    """A checked run before its folder is opened: task, program, parts, and choice of its folder."""

    task: ResolvedTask
    program: Program
    assembly: Assembly
    choose: Callable[[], Chosen]
    damaged: Sequence[str]  # messages on damage of the log
    notes: list[str]


def prepare(
    spec: RunSpec,
    given: Any,
    wanted: RunFolderRequest,
    mesh: Mesh,
    *,
    fresh: bool,
    accept_code_change: bool,
    is_fork: bool,
) -> PreparedRun:
    """Build all parts of a run, choose its folder and check the run before it starts.

    `given` is the task object, or None for the task that the spec names. Raises InputError for a
    run that cannot be started.
    """
    environment.set_seeds(spec.train.seed)
    task, spec = take_task(spec, given)
    program = Program.of(task.importable, task.task)
    # before any code of the task may change the working folder
    spec = environment.with_whole_paths(spec)
    choose = functools.partial(
        folder.choose,
        wanted,
        spec.id,
        task.name,
        program,
        fresh=fresh,
        accept_code_change=accept_code_change,
        is_fork=is_fork,
        checks_log=False,
        spec=spec,
    )
    chosen = choose(checks_log=mesh.whole.is_first)
    check_as_stated(chosen, spec, task)  # before the data are read
    assembly = assemble(spec, task, mesh=mesh)
    checked = preflight.check(assembly, is_again=chosen.is_again)
    notes = [*assembly.notes, *checked]
    return PreparedRun(task, program, assembly, choose, chosen.damaged, notes)
