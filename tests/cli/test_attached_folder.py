"""Folders without a spec: those of an attached loop, of a run that lost it, of weights alone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as library
from surefoot import checkpoint
from surefoot.components.checkpoint import Stamp
from surefoot.contract import events, spec_file
from surefoot.contract.events import Started
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError, SurefootError
from surefoot.train.assemble import build_model, load_task
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.cli import past_runs as past
from tests.cli.conftest import Command
from tests.train.small import FEW, write_task
from tests.train.test_attach import Loop

LOOP = Path("runs/my loop")
NEED_A_SPEC = [
    ("resume",),
    ("resume", "--fork", "new"),
    ("evaluate",),
    ("predict", "--output", "p.npz"),
    ("checkpoint export", "--to", "w.safetensors"),
    ("profile",),
    ("roofline",),
    ("explain",),
    ("memory",),
    ("bench step",),
    ("ladder",),
    ("whatif batch", "8,16"),
    ("whatif noise",),
    ("tune-loader",),
    ("verify",),
    ("spec show",),
    ("spec check",),
    ("train",),
]


def run_script(folder: Path = LOOP, passes: int = 2) -> Loop:
    """Run the script of a loop: train to the end of `passes`, or resume up to there."""
    loop = Loop()
    run = loop.attach(folder)
    for _ in range(run.first_pass, passes):
        for batch in run.batches():
            run.step_done(loop.train_on(batch))
    run.close()
    return loop


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Path]:
    """A loop that has ended, and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ended"))
        return run_script(), LOOP.absolute()


@pytest.fixture
def loop(ended: tuple[Loop, Path], surefoot: Command) -> Loop:
    """A loop that has ended, with a copy of its folder in the working folder."""
    shutil.copytree(ended[1], LOOP)
    return ended[0]


def load_as_told(told: str) -> nn.Module:
    """Run the Python call of a hint as it is written, on a new model."""
    calls = re.findall(r"surefoot\.checkpoint\.load_into\(.*?\)", told)
    assert len(calls) == 1, told
    model = Loop(seed=1).model
    eval(calls[0], {"surefoot": library, "model": model})
    return model


def is_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("words", NEED_A_SPEC, ids=" ".join)
def test_a_verb_that_needs_a_spec_says_what_the_folder_of_a_loop_is(
    words: tuple[str, ...], loop: Loop, surefoot: Command
) -> None:
    verb, *more = words
    answer = surefoot(*verb.split(), LOOP, *more)
    assert answer.code == 2
    assert answer.err == (
        f"error: {LOOP} is the folder of a training loop with surefoot.attach: it has no spec and "
        "no task\n"
        "hint: choose one:\n"
        "  resume the loop: run its script again\n"
        f"  load its weights, in Python: surefoot.checkpoint.load_into(model, '{LOOP}', 'last')\n"
        f"  read its records: surefoot show '{LOOP}'; why, ledger and check read it too\n"
    )


def test_every_way_of_the_hint_works_as_written(loop: Loop, surefoot: Command) -> None:
    told = surefoot("resume", LOOP).err
    assert is_equal(load_as_told(told), loop.model)
    (show,) = re.findall(r"surefoot show '.*?'", told)
    for verb in ("show", "why", "ledger", "check"):
        answer = surefoot(*shlex.split(show.replace("show", verb))[1:])
        assert (answer.code, answer.err) == (0, ""), verb
    again = run_script(passes=3)
    starts = [each for each in events.read(LOOP) if isinstance(each, Started)]
    assert [each.first_step for each in starts] == [1, 7]
    assert is_equal(load_as_told(told), again.model)
    assert not is_equal(again.model, loop.model)


@pytest.mark.parametrize(
    "call",
    [
        lambda: library.load(LOOP),
        lambda: library.load(str(LOOP), task=object()),
        lambda: spec_file.read_of_run(LOOP),
        lambda: spec_file.read(str(LOOP)),
    ],
    ids=["load", "load with a task", "spec of a run", "spec"],
)
def test_python_says_it_too(call: Any, loop: Loop) -> None:
    with pytest.raises(SurefootError, match="training loop with surefoot") as told:
        call()
    assert is_equal(load_as_told(str(told.value.hint)), loop.model)


def test_a_loop_without_a_checkpoint_is_told_of_no_weights(surefoot: Command) -> None:
    Loop().attach(LOOP, save=None)
    answer = surefoot("resume", LOOP)
    assert "training loop with surefoot.attach" in answer.err
    assert "weights" not in answer.err


def test_a_loop_that_lost_its_log_is_known_by_its_checkpoints(
    loop: Loop, surefoot: Command
) -> None:
    (LOOP / "events.jsonl").unlink()
    answer = surefoot("evaluate", LOOP)
    assert "training loop with surefoot.attach" in answer.err
    assert is_equal(load_as_told(answer.err), loop.model)


def test_a_run_is_not_started_in_the_folder_of_a_loop_nor_a_loop_in_that_of_a_run(
    loop: Loop, surefoot: Command, tmp_path: Path
) -> None:
    task = write_task(tmp_path)
    answer = surefoot("train", task, *FEW, "--run", LOOP, "--quiet")
    assert answer.code == 2
    assert answer.err == (
        f"error: {LOOP} is the folder of a training loop with surefoot.attach: only the script of "
        "that loop can resume it\n"
        "hint: give another --run folder, or --fresh; in Python another folder=, or fresh=True\n"
    )
    assert surefoot("train", task, *FEW, "--run", LOOP, "--fresh", "--quiet").code == 0
    assert surefoot("train", task, *FEW, "--run", "other", "--quiet").code == 0
    with pytest.raises(RunFolderError, match="folder of a run with a spec, not of a loop") as told:
        run_script(Path("other"))
    assert told.value.hint == "give attach another folder="


def test_a_run_starts_with_the_weights_of_a_loop_and_is_not_forked_from_it(
    surefoot: Command, tmp_path: Path
) -> None:
    task = write_task(tmp_path)
    spec = spec_file.read(str(task)).spec
    model = build_model(spec, load_task(spec))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = library.attach(model=model, optimizer=optimizer, data=Loop().data, folder=LOOP)
    for batch, _ in run.batches():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
    run.close()
    more = ("--weights", LOOP, "--run", "new", "--quiet")
    assert surefoot("train", task, *FEW, *more).code == 0
    checkpoint.load_into(other := build_model(spec, load_task(spec)), "new", 0)
    assert is_equal(other, model)
    with (
        pytest.raises(RunFolderError, match="training loop with surefoot"),
        Run(spec, folder="fork", start=Start(LOOP, 3)),
    ):
        pass


def test_the_summary_of_a_loop_names_only_what_works(loop: Loop, surefoot: Command) -> None:
    told = surefoot("show", LOOP).out
    assert told.startswith(f"{LOOP}: linear, finished, started ")
    assert "score" not in told
    assert "surefoot roofline" not in told
    assert "run the script of the loop with another folder; with this one it resumes" in told
    assert is_equal(load_as_told(told), loop.model)
    assert surefoot("report", LOOP).code == 0
    page = (LOOP / "report.html").read_text()
    assert "surefoot train" not in page
    assert "linear: finished<" in page


def test_a_run_without_its_spec_gets_it_back_from_its_log(
    surefoot: Command, tmp_path: Path
) -> None:
    task = write_task(tmp_path)
    assert surefoot("train", task, *FEW, "--run", "run", "--quiet").code == 0
    Path("run/spec.toml").unlink()
    told = surefoot("show", "run").out
    assert "n/a: the folder has lost its spec.toml" in told
    assert "surefoot.load" not in told
    assert "surefoot roofline" not in told
    assert surefoot("evaluate", "run").err == (
        "error: run is a run without its spec.toml\n"
        "hint: put its spec back as run/spec.toml; the log has the values: "
        'surefoot show run --json prints them under "spec"\n'
    )
    values = surefoot("show", "run", "--json").row["spec"]
    Path("run/spec.toml").write_text(spec_file.write(RunSpec.of_record(values)))
    assert surefoot("check", "run").code == 0
    assert surefoot("evaluate", "run").code == 0
    assert "surefoot.load('run')" in surefoot("show", "run").out


def test_a_folder_of_weights_alone_says_how_to_load_them(surefoot: Command) -> None:
    model = Loop().model
    checkpoint.save("weights", 3, {"model": model})
    answer = surefoot("evaluate", "weights")
    assert answer.code == 2
    assert "weights holds checkpoints and no spec.toml, so it is not a run" in answer.err
    assert is_equal(load_as_told(answer.err), model)
    assert "surefoot checkpoint list weights\n" in answer.err
    assert surefoot("checkpoint", "list", "weights").code == 0


@pytest.mark.parametrize("verb", ["train", "explain", "spec check"])
def test_a_run_folder_in_place_of_a_spec_is_told_of_resume(
    verb: str, surefoot: Command, tmp_path: Path
) -> None:
    task = write_task(tmp_path)
    assert surefoot("train", task, *FEW, "--run", "my run", "--quiet").code == 0
    answer = surefoot(*verb.split(), "my run")
    assert answer.code == 2
    assert answer.err == (
        "error: my run is a run folder, not a spec\n"
        "hint: surefoot resume 'my run' resumes that run; its spec is 'my run/spec.toml'\n"
    )
    assert surefoot("resume", "my run", "--quiet").code == 0
    assert surefoot("spec", "check", "my run/spec.toml").code == 0


def test_another_folder_in_place_of_a_spec_is_called_a_folder(surefoot: Command) -> None:
    Path("empty").mkdir()
    assert "'empty' is not a spec: it is a folder" in surefoot("train", "empty").err


def test_weights_are_loaded_from_the_last_the_best_or_a_numbered_step(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    models = {step: Loop(seed=step).model for step in (1, 2)}
    for step, model in models.items():
        checkpoint.save(folder, step, {"model": model})
    for asked, step in ((1, 1), (2, 2), ("last", 2), ("best", 2), ("1", 1)):
        other = nn.Linear(4, 3)
        assert checkpoint.load_into(other, folder, asked).step == step
        assert is_equal(other, models[step])
    with pytest.raises(RunFolderError, match="holds no checkpoint of step first"):
        checkpoint.load_into(nn.Linear(4, 3), folder, "first")


def test_checkpoints_show_a_score_as_show_does(surefoot: Command) -> None:
    run = past.write_finished(Path("run"))
    score = {"name": "accuracy", "value": 0.933, "better": "higher", "split": "test"}
    checkpoint.save(run, 40, {"model": nn.Linear(2, 2)}, Stamp(score=score, spec_id="x"))
    assert "accuracy 93.3 %" in surefoot("checkpoint", "list", run).out
    assert "accuracy 93.3 %" in surefoot("checkpoint", "show", run).out
    (row,) = surefoot("checkpoint", "list", run, "--json").row["commits"]
    assert row["score"] == json.loads(json.dumps(score))
    (run / "events.jsonl").unlink()  # the unit is in the log alone
    assert "accuracy 0.933" in surefoot("checkpoint", "list", run).out
