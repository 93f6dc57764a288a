"""Fresh processes: what they used, how they ended, and that none outlives the harness."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import BadRecordError, InputError, SpecError
from surefoot.trial import Arm, child, read_report, run_arm, spec_arm, write_report
from tests.train.small import spec as small_spec
from tests.train.small import write_task
from tests.trial.arms import code_arm, telling_arm

ROOT = Path(__file__).resolve().parents[2]
linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent"
)


def is_running(pid: int) -> bool:
    """A zombie has ended: only its number is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> bool:
    until_s = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < until_s:
        time.sleep(0.01)
    return not is_running(pid)


def test_an_arm_reports_its_measures_beside_what_is_seen_from_outside(tmp_path: Path) -> None:
    outcome = run_arm(telling_arm("a", "{'loss': 0.5}"), tmp_path / "work", number=3)
    assert (outcome.ended, outcome.arm, outcome.round, outcome.error) == ("done", "a", 3, None)
    assert outcome.measures["loss"] == 0.5
    assert set(outcome.measures) == {
        "loss",
        "process_cpu_s",
        "process_wall_s",
        "process_peak_bytes",
    }
    assert 0 < outcome.measures["process_cpu_s"] < 60


def test_the_memory_of_the_harness_is_not_counted_as_the_arms(tmp_path: Path) -> None:
    ballast = bytearray(300 << 20)
    ballast[:: 1 << 12] = b"x" * len(ballast[:: 1 << 12])  # a page is resident once it is written
    small = run_arm(code_arm("small", "pass"), tmp_path / "small").measures["process_peak_bytes"]
    large = run_arm(
        code_arm("large", "len(bytearray(200 << 20).replace(b'x', b'y'))"), tmp_path / "large"
    )
    assert small < 100 << 20 < 200 << 20 < large.measures["process_peak_bytes"]
    del ballast


def test_a_crash_gives_the_tail_of_its_error_and_its_exit_code(tmp_path: Path) -> None:
    code = (
        "import sys; print('noise\\n' * 100, file=sys.stderr); "
        "raise ValueError('the reason at the end')"
    )
    outcome = run_arm(code_arm("a", code), tmp_path / "work")
    assert outcome.ended == "crashed"
    assert outcome.measures == {}
    assert outcome.error is not None
    assert outcome.error.startswith("exit code 1")
    assert outcome.error.endswith("ValueError: the reason at the end")
    assert len(outcome.error.splitlines()) < 20


def test_a_command_that_is_not_there_and_a_killed_one_are_crashes(tmp_path: Path) -> None:
    missing = run_arm(Arm(name="a", command=("no-such-command",)), tmp_path / "a")
    killed = run_arm(code_arm("b", "import os; os.kill(os.getpid(), 9)"), tmp_path / "b")
    assert (
        missing.error
        == "exit code 127\nno-such-command cannot be started: No such file or directory"
    )
    assert (killed.ended, killed.error) == ("crashed", "exit code -9")
    assert (missing.exit_code, killed.exit_code) == (127, -9)


def test_a_report_that_is_missing_or_none_is_a_crash_in_words(tmp_path: Path) -> None:
    silent = run_arm(code_arm("a", "import sys; sys.argv[1]"), tmp_path / "a")
    babbling = run_arm(
        code_arm("b", "import sys; open(sys.argv[1], 'w').write('[1]')"), tmp_path / "b"
    )
    assert silent.error is not None
    assert babbling.error is not None
    assert silent.error.startswith("no report was written")
    assert babbling.error.startswith("the report is none")


def test_a_hang_ends_at_its_time_and_takes_its_own_children_along(tmp_path: Path) -> None:
    code = (
        "import os, time\nchild = os.fork()\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)"
    )
    for timeout_s in (1.5, 15.0, 150.0):  # a busy machine may not have begun after the first
        told = tmp_path / "pids"
        told.write_text("")
        outcome = run_arm(code_arm("a", code, timeout_s=timeout_s), tmp_path / f"{timeout_s}")
        assert outcome.ended == "timed out"
        assert outcome.error is not None
        assert outcome.error.startswith(f"still running after {timeout_s:g} s")
        if len(pids := [int(line) for line in told.read_text().split()]) == 2:
            break
    assert len(pids) == 2
    assert all(wait_until_gone(pid) for pid in pids)


def test_what_an_arm_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    tells = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child))"
    code = f"import os, time\nchild = os.fork()\nif child:\n    {tells}\nelse:\n    time.sleep(600)"
    outcome = run_arm(code_arm("a", code), tmp_path / "work")
    assert outcome.ended == "done"
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


@linux_only
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_a_killed_harness(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    arm = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    harness = (
        "import sys; from pathlib import Path; from surefoot.trial import Arm, run_arm\n"
        f"run_arm(Arm(name='a', command=(sys.executable, '-I', '-S', '-c', {arm!r})), "
        f"Path({str(tmp_path / 'work')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", harness], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while not (pid_file.exists() and pid_file.read_text()) and process.poll() is None:
            time.sleep(0.01)
        child = int(pid_file.read_text())
        assert is_running(child)
        process.send_signal(number)
        process.wait(timeout=600)
        assert wait_until_gone(child)
    finally:
        process.kill()
        process.wait()


def test_every_rank_has_its_place_and_a_failing_one_ends_the_others(tmp_path: Path) -> None:
    tells = (
        "{'rank': int(os.environ['RANK']), 'world': int(os.environ['WORLD_SIZE']), "
        "'port': int(os.environ['MASTER_PORT'])}"
    )
    code = (
        f"import os, json, sys; json.dump({{'version': 1, 'measures': {tells}}}, "
        "open(sys.argv[1], 'w'))"
    )
    both = run_arm(code_arm("both", code, ranks=2), tmp_path / "both")
    assert (both.measures["rank"], both.measures["world"]) == (0, 2)
    assert json.loads((tmp_path / "both/rank1/report.json").read_text())["measures"]["rank"] == 1
    code = (
        "import os, sys, time; sys.exit('rank 1 gives up') if os.environ['RANK'] == '1' "
        "else time.sleep(600)"
    )
    one = run_arm(code_arm("one", code, ranks=2), tmp_path / "one")
    assert one.error == "rank 1 of 2: exit code 1\nrank 1 gives up"


def test_the_arms_environment_is_given_and_arguments_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    measures = (
        "{'threads': int(__import__('os').environ['OMP_NUM_THREADS']), "
        "'mine': int(__import__('os').environ['MINE'])}"
    )
    plain = telling_arm("a", measures)
    arm = Arm(name="a", command=plain.command, threads=2, variables={"MINE": "5"})
    outcome = run_arm(arm, tmp_path / "work")
    assert (outcome.measures["threads"], outcome.measures["mine"]) == (2, 5)


def test_an_arm_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a valid name"):
        Arm(name="../up", command=("true",))
    with pytest.raises(InputError, match="has no command"):
        Arm(name="a", command=())
    with pytest.raises(InputError, match="time-out of 0"):
        Arm(name="a", command=("true",), timeout_s=0)
    with pytest.raises(InputError, match="does not exist"):
        run_arm(code_arm("a", "pass", folder=tmp_path / "none"), tmp_path / "work")
    with pytest.raises(SpecError, match="needs a task that can be imported"):
        spec_arm("a", RunSpec(), steps=1)
    with pytest.raises(InputError, match="do not fit"):
        spec_arm("a", RunSpec(task={"use": "digits"}), steps=5, warmup=0, capture=(6,))


def test_a_report_holds_finite_numbers_only(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match="loss is nan"):
        write_report(tmp_path / "r.json", {"loss": float("nan")})
    (tmp_path / "r.json").write_text('{"version": 1, "measures": {"loss": NaN}}')
    with pytest.raises(BadRecordError, match="not finite"):
        read_report(tmp_path / "r.json")
    assert not [path for path in os.listdir(tmp_path) if path != "r.json"]


def test_a_start_lasts_until_what_is_compiled_has_run() -> None:
    firsts = {
        what: child.first_regular_step(small_spec(9, compile={"what": what}))
        for what in ("none", "blocks", "model", "step")
    }
    assert firsts == {"none": 1, "blocks": 2, "model": 2, "step": 6}


def test_a_spec_s_window_begins_after_its_warm_up_and_its_start_up_stands_apart(
    tmp_path: Path,
) -> None:
    """The first two steps, of which a compiler would take much longer, wait half a second each."""
    use = write_task(
        tmp_path, change=("# FORWARD", "import time; time.sleep(0.5 if STEP <= 2 else 0)")
    )
    (tmp_path / "spec.toml").write_text(spec_file.write(small_spec(60, task={"use": use})))
    began_s = time.perf_counter()
    words = ["--warmup", "3", "--steps", "5", "--started", repr(began_s)]
    child.main(
        [
            str(tmp_path / "spec.toml"),
            "--report",
            str(tmp_path / "report.json"),
            "--run",
            str(tmp_path / "run"),
            *words,
        ]
    )
    elapsed_s = time.perf_counter() - began_s
    measures = read_report(tmp_path / "report.json").measures
    assert measures["num_samples"] == 5 * 4
    assert (measures["items_per_sample"], measures["applied_share"]) == (1.0, 1.0)
    assert measures["startup_s"] >= 0.5
    window_s = measures["wall_s_per_sample"] * measures["num_samples"]
    assert window_s == pytest.approx(measures["wall_s_per_step"] * 5)
    assert window_s <= elapsed_s - measures["startup_s"] - 0.5
