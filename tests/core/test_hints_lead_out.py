"""Hints are followed as they are written: each way that a hint names leads out of its error."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot import RunSpec
from surefoot.core.errors import SpecError
from tests.train.small import FEW, call, write_task

Tables = dict[str, dict[str, Any]]
# what a user might choose where a hint leaves the value open
CHOSEN: dict[str, Any] = {
    "optim.ema": 0.9,
    "loader.workers": 2,
    "compile.what": "model",
    "memory.activation_checkpointing": "full",
    "layout.shard": 2,
}
JSON = r'"[^"]*"|true|false|-?\d[\d.]*'
MAX_ERRORS = 6  # one after the other, each with its own hint


def edited(tables: Tables, key: str, value: Any) -> Tables:
    """The tables with another value of `table.key`; without the key for None."""
    table, name = key.split(".")
    made = copy.deepcopy(tables)
    made.setdefault(table, {})[name] = value
    if value is None:
        del made[table][name]
    return made


def renamed(tables: Tables, message: str, right: str) -> Tables:
    """The tables with the key, table or value that the message quotes written as `right`."""
    (wrong,) = re.findall(r"'([^']+)'", message)[:1]
    made = json.loads(json.dumps(tables))
    if wrong in made:
        made[right] = made.pop(wrong)
        return made
    for table in list(made):
        if wrong in made[table]:
            into, _, name = right.rpartition(".")
            made.setdefault(into or table, {})[name] = made[table].pop(wrong)
            return made
        made[table] = {
            name: right if value == wrong else value for name, value in made[table].items()
        }
    return made


def ways_of(error: SpecError, tables: Tables) -> Iterator[Tables]:
    """The tables as each way of the hint leaves them."""
    hint, message = str(error.hint), error.message
    inside = re.match(r"\[(\w+)\] (\w+)", message)  # keys of this table are named alone
    subject = re.match(r"(\w+\.\w+)", message)

    def whole(key: str) -> str:
        return key if "." in key or inside is None else f"{inside[1]}.{key}"

    for key in re.findall(r"leave ([\w.]+) out", hint):
        yield edited(tables, whole(key), None)
    for key, value in re.findall(rf"set ([\w.]+) = ('[^']*'|{JSON})", hint):
        yield edited(tables, whole(key), json.loads(value.replace("'", '"')))
    for key, values in re.findall(rf"set ([\w.]+) to ((?:{JSON})(?:(?:, | or )(?:{JSON}))*)", hint):
        for value in re.findall(JSON, values):
            yield edited(tables, whole(key), json.loads(value))
    for key in re.findall(r"set ([\w.]+)(?= to another value than|$|, )", hint):
        yield edited(tables, whole(key), CHOSEN[whole(key)])
    for right in re.findall(r"did you mean '([^']+)'\?", hint):
        yield renamed(tables, message, right)
    if "use one of" in hint and inside is not None:
        for value in json.loads(hint[hint.index("[") :]):
            yield edited(tables, whole(inside[2]), value)
    if inside is not None and (example := re.search(r"use one, for example ([\d.]+)", hint)):
        yield edited(tables, whole(inside[2]), float(example[1].rstrip(".")))
    if subject is not None and ("needs its unit" in hint or "number with its unit" in hint):
        for value in re.findall(r'"([^"]+)"', hint):
            if not (value.endswith("%") and subject[1] == "train.length"):  # "of the run"
                yield edited(tables, subject[1], value)
    if subject is not None and (example := re.search(r'for example "([^"]+)"', hint)):
        yield edited(tables, subject[1], example[1])


def refusal_of(tables: Tables) -> SpecError | None:
    try:
        RunSpec.model_validate(tables)
    except SpecError as error:
        return error
    return None


def assert_leads_out(tables: Tables, errors: tuple[str, ...] = ()) -> None:
    refused = refusal_of(tables)
    if refused is None:
        return
    assert refused.message not in errors, f"a circle: {refused}"
    assert len(errors) < MAX_ERRORS, errors
    ways = list(ways_of(refused, tables))
    assert ways, f"no way in the hint: {refused}"
    for changed in ways:
        assert_leads_out(changed, (*errors, refused.message))


@pytest.mark.parametrize(
    "tables",
    [
        {"train": {"batch": 10, "microbatch": 4}},
        {"optim": {"momentum": 0.5}},
        {"optim": {"clip_value": 0.5}},
        {"optim": {"ema_ramp": False}},
        {"optim": {"name": "adamm"}},
        {"precision": {"weights": "bf16"}},
        {"precision": {"compute": "float16"}},
        {"precision": {"init_scale": 1000.0, "compute": "fp16"}},
        {"memory": {"update_in_backward": True}},
        {"memory": {"blocks": ["a"]}},
        {"train": {"bacth": 8}},
        {"train": {"lr": 1.0}},
        {"optimizer": {"lr": 1.0}},
        {"loader": {"kind": "thread"}},
        {"compile": {"mode": "max-autotune"}},
        {"schedule": {"name": "step"}},
        {"schedule": {"name": "cosin"}},
        {"schedule": {"warmup": "5 steps", "warmup_start": 0.5}},
        {"data": {"window": 3, "shuffle": False}},
        {"data": {"max_bad": 0.5}},
        {"stability": {"max_skips": 2, "nonfinite": "stop"}},
        {"layout": {"compress_rank": 2}},
        {"layout": {"bucket_size": 0}},
        {"checkpoint": {"every": "5"}},
        {"train": {"length": 500}},
    ],
    ids=str,
)
def test_each_way_of_a_hint_leads_out_of_the_error_of_a_spec(tables: Tables) -> None:
    with pytest.raises(SpecError):
        RunSpec.model_validate(tables)
    assert_leads_out(tables)


# ---- commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hint_of(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    return (said.out + said.err).partition("hint: ")[2]


@pytest.mark.parametrize("change", [("--set", "optim.lr=0.5"), ("--steps", "12")])
def test_the_command_that_a_hint_names_for_a_changed_run_trains_it(
    change: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = ("train", "mine.py:Mine", *FEW, "--set", 'checkpoint.every="4 steps"', "--quiet")
    assert call(monkeypatch, *train, "--run", "first") == 0
    capsys.readouterr()
    assert call(monkeypatch, "resume", "first", *change) == 2
    (command,) = re.findall(r"surefoot (.+)", hint_of(capsys))[:1]
    assert call(monkeypatch, *shlex.split(command)) == 0
    assert (folder / "NEW" / "spec.toml").is_file()


@pytest.mark.parametrize(
    ("typed", "pattern"),
    [
        (("spec", "check", "digitz"), r"did you mean '(\w+)'"),
        (("spec", "check", "mine.py:Mni"), r"name its class: (\S+)"),
    ],
)
def test_the_name_that_a_hint_gives_is_one(
    typed: tuple[str, ...],
    pattern: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *typed) == 2
    (right,) = re.findall(pattern, hint_of(capsys))
    assert call(monkeypatch, *typed[:-1], right) == 0


def test_the_command_that_lists_runs_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "show", "nowhere") == 2
    (command,) = re.findall(r"surefoot (\w+)", hint_of(capsys))[:1]
    assert call(monkeypatch, command) == 0
