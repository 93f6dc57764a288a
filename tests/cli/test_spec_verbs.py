"""Tests of `surefoot spec`.

Every value with its origin, what is wrong with its place, ids that mean something, schedules drawn.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from surefoot.contract.spec import key_names, synonyms
from tests.cli.conftest import Command


def origins(surefoot: Command, *words: str | Path) -> dict[str, tuple[object, str]]:
    answer = surefoot("spec", "show", *words, "--json")
    assert answer.code == 0, answer.err
    return {row["key"]: (row["value"], row["origin"]) for row in answer.row["values"]}


def test_every_value_is_shown_with_the_place_it_came_from(
    surefoot: Command, spec_file: Path
) -> None:
    found = origins(
        surefoot,
        spec_file,
        "--set",
        "optim.clip=0.5",
        "--steps",
        "7",
        "--seed",
        "3",
        "--data",
        "here",
    )
    assert found["optim.lr"] == (0.02, "mine.toml:5")
    assert found["optim.clip"] == (0.5, "--set optim.clip")
    assert found["train.length"] == ("7 steps", "--steps")
    assert found["train.seed"] == (3, "--seed")
    assert found["data.folder"] == (str(spec_file.parent / "here"), "--data")
    assert found["optim.weight_decay"] == (0.01, "default")
    assert found["task.width"] == (8, "default")
    assert found["task.use"] == (f"{spec_file.parent / 'task.py'}:Mine", "mine.toml:2")


def test_a_variant_shows_its_own_lines_and_those_of_its_base(
    surefoot: Command, spec_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "wide.toml").write_text('base = "mine.toml"\n[task]\nwidth = 32\n')
    (tmp_path / "wider.toml").write_text(
        'base = "wide.toml"\n[task]\nwidth = 64\n[optim]\nweight_decay = 0.0\n'
    )
    found = origins(surefoot, "wider.toml", "--set", "optim.weight_decay=0.1")
    assert found["task.width"] == (64, "wider.toml:3")
    assert found["optim.lr"] == (0.02, "mine.toml:5")
    assert found["optim.weight_decay"] == (0.1, "--set optim.weight_decay")
    assert found["task.use"] == (f"{tmp_path / 'task.py'}:Mine", "mine.toml:2")


def test_in_a_pipe_the_table_is_plain_aligned_text(surefoot: Command, spec_file: Path) -> None:
    table, _, formulas = surefoot("spec", "show", spec_file).out.partition("\n\n")
    lines = table.splitlines()
    assert formulas.splitlines()[0].split() == ["key", "formula"]
    assert lines[0].split() == ["key", "value", "from"]
    at = lines[0].index("from")
    assert all(line[at - 1] == " " != line[at] for line in lines)
    assert not any(set(line) & set("│─\x1b") for line in lines)
    assert any(line.split() == ["optim.lr", "0.02", "mine.toml:5"] for line in lines)
    assert any(line.split() == ["data.folder", "-", "default"] for line in lines)


WRONG = {
    "an unknown key": (
        "[optim]\nlrr = 1.0",
        "mine.toml:4: 'lrr' is not a key in [optim]",
        "did you mean 'lr'?",
    ),
    "an unknown table": (
        "[optimm]\nlr = 1.0",
        "mine.toml:3: 'optimm' is not a table",
        "did you mean 'optim'?",
    ),
    "torch's name of a key": (
        "[optim]\nlearning_rate = 1.0",
        "mine.toml:4: 'learning_rate' is not a key in [optim]",
        "did you mean 'lr'?",
    ),
    "a hyphen": (
        "[optim]\nweight-decay = 1.0",
        "mine.toml:4: 'weight-decay' is not a key in [optim]",
        "did you mean 'weight_decay'?",
    ),
    "a loader's name": (
        "[loader]\nnum_workers = 2",
        "'num_workers' is not a key in [loader]",
        "did you mean 'workers'?",
    ),
    "epochs": (
        "[train]\nepochs = 3",
        "'epochs' is not a key in [train]",
        "did you mean 'length', as in length = \"3 epochs\"?",
    ),
    "a key of another table": (
        "[train]\nlr = 1.0",
        "'lr' is not a key in [train]",
        "did you mean 'optim.lr'?",
    ),
    "a synonym of a table": (
        "[optimizer]\nlr = 1.0",
        "'optimizer' is not a table",
        "did you mean 'optim'?",
    ),
    "an unknown parameter": ("wdith = 3", "mine.toml:3: ", "did you mean 'width'?"),
    "a parameter of a different type": (
        "width = 'x'",
        "mine.toml:3: task.width is 'x'",
        "of type int",
    ),
    "a different type": (
        "[train]\nbatch = '64'",
        "mine.toml:4: train.batch is '64'",
        "it should be a valid integer",
    ),
    "a fraction for a count": ("[train]\nbatch = 6.5", "mine.toml:4: train.batch is 6.5", "hint:"),
    "NaN": ("[optim]\nlr = nan", "mine.toml:4: optim.lr is nan", "finite"),
    "infinity": ("[optim]\nlr = inf", "mine.toml:4: optim.lr is inf", "finite"),
    "a negative rate": (
        "[optim]\nlr = -0.1",
        "mine.toml:4: optim.lr is -0.1",
        "greater than or equal to 0",
    ),
    "negative steps": (
        "[train]\nlength = '-5 steps'",
        "mine.toml:4: ",
        "a duration is a number with its unit",
    ),
    "no steps": (
        "[train]\nlength = '0 steps'",
        "mine.toml:4: train.length: 0 steps is zero",
        "use at least 1 step",
    ),
    "a bare number": (
        "[train]\nlength = 500",
        "mine.toml:4: train.length: 500 is not a duration",
        "a number with its unit",
    ),
    "a bare number for a size": (
        "[layout]\nbucket_size = 0",
        "mine.toml:4: layout.bucket_size: 0 is not a size in bytes",
        "needs its unit",
    ),
    "none of several kinds": (
        "[loader]\nworkers = -1",
        "mine.toml:4: loader.workers is -1",
        "equal to 0 or 'auto'",
    ),
    "a pair that lacks one": (
        "[optim]\nbetas = [0.5]",
        "mine.toml:4: optim.betas.1 is not given",
        "optim.betas needs more",
    ),
    "a duration in time with a prefix": ("[train]\nlength = '3 M min'", "mine.toml:4: ", "hint:"),
    "two kinds of clipping": (
        "[optim]\nclip = 1.0\nclip_value = 0.5",
        "contradicts clip = 1",
        "set clip = 0",
    ),
    "a microbatch that does not divide": (
        "[train]\nbatch = 10\nmicrobatch = 4",
        "does not divide batch = 10",
        "use one of [1, 2, 5, 10]",
    ),
    "a schedule that is none": (
        "[schedule]\nname = 'cosin'",
        "mine.toml:4: schedule.name is 'cosin'",
        "did you mean 'cosine'?",
    ),
    "a key of another schedule": (
        "[schedule]\nname = 'cosine'\npower = 2.0",
        "mine.toml:5: ",
        "power belongs to polynomial",
    ),
    "a schedule without what it needs": (
        "[schedule]\nname = 'step'",
        "schedule.every is not given",
        "for example",
    ),
    "a warm-up longer than the run": (
        "[train]\nlength = '10 steps'\n[schedule]\nwarmup = '20 steps'",
        "mine.toml:6: ",
        "hint:",
    ),
    "a warm-up longer than the run, in epochs": (
        "[train]\nlength = '1 epoch'\n[schedule]\nwarmup = '2 epochs'",
        "mine.toml:6: the schedule does not fit into train.length = '1 epoch'",
        "make the warm-up shorter",
    ),
    "what is no TOML": ("[optim", "is not valid TOML", "hint:"),
    "a value outside a table": ("x = 1\n[optim]", "mine.toml:", "hint:"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_with_its_place_and_what_is_near(
    what: str, surefoot: Command, spec_file: Path
) -> None:
    body, says, hints = WRONG[what]
    spec_file.write_text(f'[task]\nuse = "task.py:Mine"\n{body}\n')
    answer = surefoot("spec", "check", spec_file)
    assert answer.code == 2
    assert not answer.out
    error, _, hint = answer.err.partition("hint:")
    assert says in error
    assert hints.removeprefix("hint:") in hint
    assert len(answer.err) < 1_000


def test_a_spec_without_a_task_is_not_ok(surefoot: Command, spec_file: Path) -> None:
    spec_file.write_text("")
    answer = surefoot("spec", "check", spec_file)
    assert (answer.code, answer.out) == (2, "")
    assert "the spec names no task" in answer.err
    assert surefoot("spec", "check", spec_file, "--set", "task.use=digits").code == 0


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("lr=3", "--set optim.lr=3?"),
        ("learning_rate=0.1", "--set optim.lr=0.1?"),
        ("weigth_decay=0", "--set optim.weight_decay=0?"),
        ("batch_size=8", "--set train.batch=8 or --set evaluate.batch=8?"),
        ("epochs=3", "--set 'train.length=3 epochs'?"),
        ("max_steps=500", "--set 'train.length=500 steps'?"),
        ("momentum=0.9", "--set optim.momentum=0.9?"),
        ("wd", "--set optim.weight_decay=...?"),
        ("seed=1", "--set train.seed=1?"),
        ("nothing_alike=1", "for example --set optim.lr=0.01"),
    ],
)
def test_a_key_without_its_table_is_answered_with_what_to_type(
    given: str, hint: str, surefoot: Command
) -> None:
    answer = surefoot("spec", "check", "digits", "--set", given)
    assert answer.code == 2
    assert f"--set {given!r} is not table.key=value" in answer.err
    assert hint in answer.err
    if "did you mean" in answer.err and "..." not in hint:
        typed = shlex.split(
            answer.err.partition("did you mean ")[2].partition("?")[0].partition(" or ")[0]
        )
        assert surefoot("spec", "check", "digits", *typed, "--set", "optim.name=sgd").code == 0


def test_every_synonym_leads_to_a_key_and_is_none() -> None:
    for dotted, words in synonyms.KEYS.items():
        table, _, key = dotted.partition(".")
        assert key in key_names(table)
        assert not set(words) & set(key_names(table)), dotted
    assert set(synonyms.TABLES.values()) <= set(key_names(None))
    assert not set(synonyms.TABLES) & set(key_names(None))


def test_a_wrong_flag_is_named_as_the_place(surefoot: Command, spec_file: Path) -> None:
    assert (
        "--set optim.lrr: 'lrr' is not a key"
        in surefoot("spec", "check", spec_file, "--set", "optim.lrr=1").err
    )
    assert "--steps: " in surefoot("spec", "check", spec_file, "--steps", "-3").err
    assert (
        "--set 'optim' is not table.key=value"
        in surefoot("spec", "check", spec_file, "--set", "optim").err
    )
    assert surefoot("spec", "check", spec_file, "--steps", "many").code == 2


MISSING = {
    "no such file": ("nowhere.toml", "is not a spec"),
    "nearly a built-in name": ("digts", "did you mean 'digits'?"),
    "a task file that is not there": ("nowhere.py:Task", "there is no task file"),
    "a class that is not there": ("task.py:Other", "has no class 'Other'"),
    "a folder": (".", "is not a spec"),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_spec_that_is_not_there_is_bad_input(
    what: str, surefoot: Command, spec_file: Path
) -> None:
    given, says = MISSING[what]
    answer = surefoot("spec", "check", given)
    assert answer.code == 2
    assert says in answer.err


def test_check_prints_the_id_without_importing_the_task(surefoot: Command, spec_file: Path) -> None:
    answer = surefoot("spec", "check", spec_file)
    assert (answer.code, answer.err) == (0, "")
    identity, ok = answer.out.split()
    assert (len(identity), ok) == (12, "ok")
    assert surefoot("spec", "check", spec_file, "--json").row == {
        "ok": True,
        "id": identity,
        "error": None,
        "hint": None,
        "where": None,
    }


def test_check_in_json_says_what_is_wrong_in_one_object(surefoot: Command, spec_file: Path) -> None:
    answer = surefoot("spec", "check", spec_file, "--set", "optim.lrr=1", "--json")
    assert answer.code == 2
    row = answer.row
    assert (row["ok"], row["id"], row["where"]) == (False, None, "--set optim.lrr")
    assert row["hint"].startswith("did you mean 'lr'?")


def identity(surefoot: Command, path: Path, text: str, *words: str) -> str:
    path.write_text(text)
    row = surefoot("spec", "check", path, *words, "--json").row
    assert row["ok"], row
    return str(row["id"])


def test_an_id_is_over_meaning_and_not_over_form(surefoot: Command, spec_file: Path) -> None:
    head = '[task]\nuse = "task.py:Mine"\n'
    plain = identity(
        surefoot,
        spec_file,
        f'{head}[optim]\nlr = 0.1\nweight_decay = 0.0\n[train]\nlength = "10 min"\n',
    )
    same = [
        (
            '# a comment\n[train]\nlength = "600 s" # spelt otherwise\n'
            f"[optim]\nweight_decay = 0.0\nlr = 0.1\n{head}"
        ),
        (
            f"{head}[optim]\nlr = 1e-1\nweight_decay = 0.0\neps = 1e-8\n[train]\n"
            'length = "10 minutes"\n[observe]\nevery = "3 steps"\n'
        ),
        (
            f'{head}[optim]\nlr = 0.1\nweight_decay = 0.0\n[train]\nlength = "10 min"\n'
            'threads = 2\n[data]\nfolder = "elsewhere"\n'
        ),
    ]
    assert [identity(surefoot, spec_file, text) for text in same] == [plain] * 3
    other = [
        f'{head}[optim]\nlr = 0.1\nweight_decay = 0.1\n[train]\nlength = "10 min"\n',
        f'{head}width = 9\n[optim]\nlr = 0.1\nweight_decay = 0.0\n[train]\nlength = "10 min"\n',
        f'{head}[optim]\nlr = 0.1\nweight_decay = 0.0\n[train]\nlength = "11 min"\n',
    ]
    assert len({plain, *(identity(surefoot, spec_file, text) for text in other)}) == 4
    assert identity(surefoot, spec_file, other[0], "--set", "optim.weight_decay=0.0") == plain


def test_the_schema_is_json_schema_and_knows_every_table(surefoot: Command) -> None:
    answer = surefoot("spec", "schema")
    schema = json.loads(answer.out)
    assert schema["$schema"].endswith("2020-12/schema")
    assert {"base", "task", "data", "optim", "schedule", "train", "evaluate", "checkpoint"} <= set(
        schema["properties"]
    )
    assert schema["$defs"]["OptimTable"]["properties"]["lr"]["minimum"] == 0


def test_a_schedule_is_drawn_with_its_table(surefoot: Command, spec_file: Path) -> None:
    answer = surefoot("spec", "show", spec_file, "--plot", "--set", "schedule.name=linear")
    assert (answer.code, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()[1:13]]
    assert rows[0] == ["step", "linear", "lr"]
    assert rows[1] == ["1", "1", "0.02"]
    assert rows[-1] == ["100", "0.01", "0.0002"]
    assert "└" in answer.out


def test_a_run_in_epochs_is_drawn_over_epochs_and_says_what_it_assumed(
    surefoot: Command, spec_file: Path
) -> None:
    words = (
        "spec",
        "show",
        spec_file,
        "--plot",
        "--set",
        "train.length=4 epochs",
        "--set",
        "schedule.warmup=1 epoch",
    )
    answer = surefoot(*words)
    assert "an epoch is drawn as 100 steps; set their number with --steps-per-epoch" in answer.err
    assert answer.out.splitlines()[1].split() == ["step", "epoch", "cosine", "lr"]
    assert surefoot(*words, "--json").row["total_steps"] == 400
    assert surefoot(*words, "--json", "--steps-per-epoch", "7").row["total_steps"] == 28


def test_schedules_are_compared_side_by_side(surefoot: Command, spec_file: Path) -> None:
    names = ["cosine", "step", "exponential", "plateau"]
    answer = surefoot("spec", "show", spec_file, "--compare", "step,exponential,cosine,plateau")
    assert answer.out.splitlines()[1].split() == ["step", *names]
    row = surefoot("spec", "show", spec_file, "--compare", ",".join(names), "--json").row
    curves = {curve["name"]: curve["multipliers"] for curve in row["curves"]}
    assert list(curves) == names
    assert sorted(set(curves["step"]), reverse=True) == pytest.approx([1, 0.1, 0.01])
    assert curves["exponential"] == sorted(curves["exponential"], reverse=True)
    assert {len(values) for values in curves.values()} == {len(row["steps"])}


def test_every_schedule_can_stand_beside_another(surefoot: Command, spec_file: Path) -> None:
    from typing import get_args

    from surefoot.core.schedule.settings import Name

    for length in ("2 steps", "1000 steps", "3 epochs", "20 M tokens"):
        answer = surefoot(
            "spec",
            "show",
            spec_file,
            "--compare",
            ",".join(get_args(Name)),
            "--set",
            f"train.length={length}",
        )
        assert answer.code == 0, answer.err


def test_a_comparison_with_no_such_schedule_is_bad_input(
    surefoot: Command, spec_file: Path
) -> None:
    answer = surefoot("spec", "show", spec_file, "--compare", "step,cosin")
    assert answer.code == 2
    assert "did you mean 'cosine'?" in answer.err


def test_a_variant_with_another_task_drops_the_parameters_of_the_first(
    surefoot: Command, spec_file: Path, tmp_path: Path
) -> None:
    spec_file.write_text(spec_file.read_text().replace(':Mine"', ":Mine\"\nkind = 'other'"))
    (tmp_path / "digits.toml").write_text(
        'base = "mine.toml"\n[task]\nuse = "digits"\nwidth = 16\n'
    )
    found = origins(surefoot, "./digits.toml")
    assert found["task.width"] == (16, "digits.toml:4")
    assert "task.kind" not in found
