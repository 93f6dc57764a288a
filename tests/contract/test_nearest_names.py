"""Hints with the name that is meant, in another spelling or by its name in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot import read_spec
from surefoot.core.errors import SpecError, TaskError, find_nearest

MEANT = [
    ("[optim]\nname = 'AdamW'", "did you mean 'adamw'?"),
    ("[optim]\nname = 'adam_w'", "did you mean 'adamw'?"),
    ("[optim]\nname = 'torch.optim.AdamW'", "did you mean 'adamw'?"),
    ("[optim]\nname = 'SGD'", "did you mean 'sgd'?"),
    ("[optim]\nname = 'Adam8bit'", "did you mean 'adam'?"),
    ("[optim]\nname = 'AdamW8bit'", "did you mean 'adamw'?"),
    ("[optim]\nname = 'RAdam'", "return torch.optim.RAdam from the task's optimizer(groups)"),
    ("[optim]\nname = 'NAdam'", "return torch.optim.NAdam from the task's optimizer(groups)"),
    ("[schedule]\nname = 'CosineAnnealing'", "did you mean 'cosine'?"),
    ("[schedule]\nname = 'CosineAnnealingWarmRestarts'", "did you mean 'cosine_restarts'?"),
    ("[schedule]\nname = 'ReduceLROnPlateau'", "did you mean 'plateau'?"),
    ("[schedule]\nname = 'one-cycle'", "did you mean 'one_cycle'?"),
    ("[precision]\ncompute = 'BF16'", "did you mean 'bf16'?"),
    ("[Optim]\nlr = 1.0", "did you mean 'optim'?"),
    ("[optim]\nWeightDecay = 1.0", "did you mean 'weight_decay'?"),
]


def read(folder: Path, text: str) -> SpecError:
    path = folder / "one.toml"
    path.write_text(f"[task]\nuse = 'digits'\n{text}")
    with pytest.raises(SpecError) as caught:
        read_spec(str(path))
    return caught.value


@pytest.mark.parametrize(("text", "hint"), MEANT)
def test_another_spelling_leads_to_the_name_that_is_meant(
    text: str, hint: str, tmp_path: Path
) -> None:
    assert str(read(tmp_path, text).hint).startswith(hint)


def test_the_same_spelling_comes_first() -> None:
    assert find_nearest("run_1", ["Run-1", "run-1", "run_1"]) == ["run_1", "Run-1", "run-1"]
    assert find_nearest("zzz", ["run"]) == []


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "[optim]\nbetas = [0.9, 0.9, 0.9]",
            "optim.betas is (0.9, 0.9, 0.9)",
            "it should have at most 2 items, not 3",
        ),
        ("[evaluate]\nsplit = ''", "split = '' names no split", "name one split or more"),
        (
            "[optim.lr_multipliers]\n'head.*' = 'b'",
            "optim.lr_multipliers is 'b' for 'head.*'",
            "it should be a valid number",
        ),
        (
            "[optim.lr_multipliers]\n'a' = 1.0\n'b' = -1.0",
            "lr_multipliers is -1.0 for 'b'",
            "use 0 or more",
        ),
        ("[optim]\nlr_multipliers = 3", "optim.lr_multipliers is 3", "it should be a valid dict"),
    ],
)
def test_a_wrong_value_is_named_without_the_words_of_pydantic(
    text: str, message: str, hint: str, tmp_path: Path
) -> None:
    error = read(tmp_path, text)
    assert message in error.message
    assert str(error.hint).startswith(hint)


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_text_is_not_taken_for_a_folder(given: str) -> None:
    with pytest.raises(SpecError, match="the spec is an empty text"):
        read_spec(given)


METHODS = "    def model(self): ...\n    def data(self, split): ...\n"


@pytest.mark.parametrize(
    ("use", "start", "end"),
    [
        ("many.py", "name one of its classes: many.py:Task0 or", "or one of 19 more"),
        ("many.py:Other", "name one of its classes: many.py:Task0 or", "or one of 19 more"),
        ("many.py:TASK_26", "name its class: many.py:Task26", "many.py:Task26"),
    ],
)
def test_a_file_of_many_classes_names_at_most_eight(
    use: str, start: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("many.py").write_text("".join(f"class Task{i}:\n{METHODS}" for i in range(27)))
    with pytest.raises(TaskError) as caught:
        read_spec(use if ":" in use else write_use(use))
    hint = str(caught.value.hint)
    assert hint.startswith(start)
    assert hint.endswith(end)
    assert hint.count("many.py:") <= 8


def write_use(use: str) -> str:
    Path("of_file.toml").write_text(f"[task]\nuse = '{use}'")
    return "of_file.toml"
