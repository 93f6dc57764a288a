"""`surefoot verify` passes what goes on exactly.

It names the first step and component of what does not.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import manifest, spec_file
from surefoot.core.errors import EXIT_VERDICT_FAILS
from surefoot.core.place import child_environment
from surefoot.prove.attempts import Interpreters, Kill
from surefoot.prove.verify import plan_kills
from tests.prove.forked import programs_are_forked
from tests.train.small import call, spec, write_task

__all__ = ["programs_are_forked"]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = shlex.quote(sys.executable)
WORDS = (
    "--steps",
    "10",
    "--kills",
    "2",
    "--set",
    "train.batch=4",
    "--set",
    "observe.tensorboard=false",
)


def verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the object of --json, and what was said."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = call(monkeypatch, "verify", *words, "--json")
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else {}, said.err


def test_a_task_with_dropout_that_is_killed_twice_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(
        tmp_path, change=("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(self.width),")
    )
    code, row, said = verify(monkeypatch, capsys, task, *WORDS, "--keep", str(tmp_path / "kept"))
    assert (code, row["holds"]) == (0, True), said
    assert [step for step, _, _ in row["kills"]] == [
        kill.step for kill in plan_kills(10, 1, 2, seed=0)
    ]
    assert {"parameters", "optimizer", "buffers", "random states", "counters"} <= set(
        row["components"]
    )
    generations = {
        json.loads(line)["generation"]
        for line in (tmp_path / "kept" / "killed" / "events.jsonl").read_text().splitlines()
    }
    assert len(generations) == 3  # two kills, and the last


@pytest.mark.parametrize(
    ("steps", "every", "kills"),
    [(4, 1, 3), (4, 1, 9), (10, 1, 2), (24, 4, 3), (24, 4, 20), (500, 83, 40)],
)
def test_kills_are_at_rising_steps_before_the_last_so_that_each_attempt_reaches_its_own(
    steps: int, every: int, kills: int
) -> None:
    for seed in range(20):
        planned = plan_kills(steps, every, kills, seed)
        places = [kill.step for kill in planned]
        assert len(places) == min(kills, steps - 1)
        assert places == sorted(set(places))
        assert places[0] >= 1
        assert places[-1] < steps
        assert all(kill.step % every == 0 for kill in planned if kill.in_save)


@pytest.mark.usefixtures("programs_are_forked")
def test_a_kill_waits_for_its_step_and_the_next_step_waits_for_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    use = write_task(tmp_path)
    (tmp_path / "spec.toml").write_text(
        spec_file.write(spec(10, task={"use": use}, checkpoint={"every": "1 step"}))
    )
    with Interpreters(tmp_path) as interpreters:
        an_hour_late = Kill(3, 3_600_000.0, in_save=False)
        assert not interpreters.attempt(
            tmp_path / "spec.toml", tmp_path / "run", steps=10, kill=an_hour_late
        )
        assert manifest.steps(tmp_path / "run")[-1] in (2, 3)
        assert interpreters.attempt(tmp_path / "spec.toml", tmp_path / "run", steps=10)
    assert manifest.steps(tmp_path / "run")[-1] == 10


NOISE = (
    "global N; N = globals().get('N') or torch.Generator().manual_seed(1); "
    "batch = (batch[0] + torch.rand(1, generator=N), batch[1])"
)
# what is planted, where the difference is said to be, in which component, and a word of the cause
PLANTED = {
    "a draw that no seed decides": (
        "import os; model[0].bias.data += os.urandom(1)[0] / 1e4",
        "repeat",
        "parameters",
        "operator",
    ),
    "state that state() does not name": (
        "model[0].bias.data += 1e-4 * STEP",
        "resume",
        "parameters",
        "state()",
    ),
    "a generator of its own": (NOISE, "resume", "", "state()"),
}
LONGER = ("a draw that no seed decides", "a generator of its own")


@pytest.mark.usefixtures("programs_are_forked")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in PLANTED],
)
def test_what_does_not_repeat_or_does_not_go_on_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, where, component, cause = PLANTED[name]
    task = write_task(tmp_path, change=("# FORWARD", planted))
    code, row, said = verify(monkeypatch, capsys, task, *WORDS)
    assert code == EXIT_VERDICT_FAILS, said
    found = row[where]
    assert found["step"] is not None
    assert component in found["component"]
    assert cause in found["cause"]


@pytest.mark.slow
def test_a_task_that_fails_by_itself_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, change=("# FORWARD", "raise ValueError('not today')"))
    code, _, said = verify(monkeypatch, capsys, task, *WORDS)
    assert code == 2
    assert "failed by itself" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("digits", "--command", "true", "--state", "x"),
        ("--command", "true"),
        ("digits", "--state", "x"),
        ("digits", "--compile", "--steps", "3"),
        ("digits", "--precision", "--kills", "2"),
        ("digits", "--seeds", "4"),
        ("--command", "true", "--state", "x", "--set", "optim.lr=1"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify(monkeypatch, capsys, *words)[0] == 2


def test_a_number_that_cannot_be_meant_is_the_one_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = verify(
        monkeypatch, capsys, "--command", "true", "--state", "out", "--kills", "0"
    )
    assert (code, "--kills must be at least 1; got 0" in said, "--steps" in said) == (
        2,
        True,
        False,
    )
    code, _, said = verify(monkeypatch, capsys, "digits", "--steps", "1")
    assert (code, "--steps is 1" in said, "--kills" in said) == (2, True, False)


def test_a_folder_that_takes_no_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = verify(
        monkeypatch, capsys, "digits", "--steps", "4", "--kills", "1", "--keep", "/proc/v"
    )
    assert code == 2
    assert "--keep /proc/v cannot be created or written" in said

    def refused(*given: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)
    for words in (("--keep", "empty"), ()):
        code, _, said = verify(monkeypatch, capsys, "digits", "--steps", "4", *words)
        assert code == 2
        assert "cannot be created or written: Read-only file system" in said


# ---- any command

SCRIPT = """
import sys, time
from pathlib import Path
import torch
out = Path("out"); out.mkdir(exist_ok=True)
file = out / "model.pt"
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if file.exists():
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"]); first = state["step"]
    if GOOD: optimizer.load_state_dict(state["optimizer"])
for step in range(first, 40):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad(); model(inputs).square().mean().backward(); optimizer.step()
    draft = out.with_name("draft.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
    torch.save(state, draft)
    draft.replace(file)
    time.sleep(0.02)
(out / "time.txt").write_text("done")
"""


def verify_script(
    text: str,
    kills: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, dict[str, Any], str]:
    """What `verify --command` says of a script that keeps all it has in out/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    return verify(
        monkeypatch,
        capsys,
        "--command",
        f"{PYTHON} train.py",
        "--state",
        "out",
        "--kills",
        str(kills),
    )


@pytest.mark.slow  # each of its processes loads torch; scripts that do not are verified below
@pytest.mark.parametrize("good", [True, False])
def test_any_script_is_told_whether_it_goes_on_exactly(
    good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, row, said = verify_script(
        SCRIPT.replace("GOOD", str(good)), 1, tmp_path, monkeypatch, capsys
    )
    assert (code, row["holds"]) == (0 if good else 1, good), (said, row)
    assert row["kills"]
    if not good:
        assert "model.pt: " in row["resume"]
        assert "differs by" in row["resume"]


def test_a_state_folder_that_is_there_already_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("years of work")
    code, _, said = verify(monkeypatch, capsys, "--command", "true", "--state", "out")
    assert code == 2
    assert "exists already" in said
    assert (tmp_path / "out" / "mine").read_text() == "years of work"


PLAIN = """
import os, shutil, sys, time
from pathlib import Path
out = Path("out"); out.mkdir(exist_ok=True)
file = out / "step.txt"
for step in range(int(file.read_text()) if file.exists() else 0, 30):
    (out / "step.draft").write_text(str(step + 1)); (out / "step.draft").replace(file)
    sys.stderr.write("x" * 8192 + "\\n")  # more than a pipe holds
    (out / f"dir{step}" / "below").mkdir(parents=True); shutil.rmtree(out / f"dir{step}")
    time.sleep(0.02 if len(sys.argv) < 2 else 0.5)
"""


def test_a_script_that_talks_much_and_whose_folders_come_and_go_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, row, said = verify_script(PLAIN, 2, tmp_path, monkeypatch, capsys)
    assert (code, row["holds"]) == (0, True), (said, row)


LINKS = """
import time
from pathlib import Path
out = Path("out"); again = out.exists(); out.mkdir(exist_ok=True)
for step in range(20):
    (out / "step").write_text(str(step)); time.sleep(0.02)
other = Path(f"elsewhere{again}"); other.mkdir(exist_ok=True); (other / "w").write_text(str(again))
data = out / "data"
data.unlink(missing_ok=True); data.symlink_to((Path() if SAME else other).resolve())
"""


@pytest.mark.parametrize("same", [True, False])
def test_where_a_link_leads_is_compared_and_what_is_not_looked_at_is_said(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, row, said = verify_script(
        LINKS.replace("SAME", str(same)), 1, tmp_path, monkeypatch, capsys
    )
    assert (code, row["holds"], row["unfollowed"]) == (0 if same else 1, same, ["data"]), (
        said,
        row,
    )
    assert row["resume"] == (
        None
        if same
        else (
            f"data is a link to {tmp_path}/elsewhereFalse, "
            f"and is a link to {tmp_path}/elsewhereTrue"
        )
    )


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; sys.exit(3)", "the command ended with 3 and said nothing on stderr"),
        ("import sys; sys.exit('no data')", "the command ended with 1: no data"),
        (
            "import os; os.mkdir('o'); os.symlink('o', 'out'); open('o/w', 'w')",
            "the command left a link in place of the folder out",
        ),
    ],
)
def test_a_command_that_leaves_nothing_to_compare_is_told_so(
    script: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    code, _, said = verify(monkeypatch, capsys, "--command", f"{PYTHON} train.py", "--state", "out")
    assert code == 2
    assert told in said.splitlines()[-2]


def test_a_command_with_an_open_quote_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = verify(monkeypatch, capsys, "--command", "python 'x", "--state", "out")
    assert code == 2
    assert "--command cannot be read: No closing quotation" in said


@pytest.mark.quick("15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_script_does_not_outlive_verify(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "plain.py").write_text(
        PLAIN.replace(
            "import os",
            "import os\nprint(os.getpid(), file=open('pid.txt', 'w'), flush=True)\nimport os",
        )
    )
    words = (
        sys.executable,
        "-m",
        "surefoot",
        "verify",
        "--command",
        f"{PYTHON} plain.py slowly",
        "--state",
        "out",
    )
    process = subprocess.Popen(
        words, cwd=tmp_path, env=child_environment(threads=1), stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "out" / "step.txt").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(60) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid.txt").read_text()), 0)


@pytest.mark.usefixtures("programs_are_forked")
@pytest.mark.parametrize("way", [pytest.param((), marks=pytest.mark.slow), ("--precision",)])
def test_a_verify_that_is_told_to_end_leaves_no_run_and_no_folder(
    way: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    words = (
        sys.executable,
        "-m",
        "surefoot",
        "verify",
        "digits",
        *way,
        "--steps",
        "100000",
        "--quiet",
    )
    variables = {**child_environment(threads=1), "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(
        words, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not list((tmp_path / "temporary").rglob("events.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(60) == 143
    assert list((tmp_path / "temporary").iterdir()) == []


REMEMBERS = """return model(batch[0])

    seen = torch.zeros(1)

    def state(self):
        return {"seen": self.seen}
"""
# what is left out, what differs then
LEFT_OUT = {"optimizer": "parameters", "schedule": "parameters", "task": "task state"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    ["task", *(pytest.param(part, marks=pytest.mark.slow) for part in ("optimizer", "schedule"))],
)
def test_a_part_that_is_left_out_on_purpose_shows_what_it_is_for(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, change=("return model(batch[0])", REMEMBERS))
    file = tmp_path / "mine.py"
    file.write_text(file.read_text().replace("# LOSS", "self.seen.add_(output.requires_grad)"))
    forget = ("--set", f'fault.forget=["{part}"]', "--set", "schedule.name=cosine", "--kills", "1")
    code, row, said = verify(monkeypatch, capsys, task, *WORDS, *forget)
    assert code == EXIT_VERDICT_FAILS, said
    assert row["repeat"] is None
    assert LEFT_OUT[part] in row["resume"]["component"]
    assert f"leaves out {part}" in row["resume"]["cause"]
    assert (row["resume"]["loss_gap"] > 0) == (part != "task")
