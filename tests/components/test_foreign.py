"""What others wrote comes in as tensors, numbers and text.

Code in it never runs, and the process that reads it cannot do harm.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint import foreign
from surefoot.components.checkpoint.foreign import child
from surefoot.contract import commits, manifest
from surefoot.core.errors import InputError, RunFolderError
from tests.prove.forked import programs_are_forked

__all__ = ["programs_are_forked"]

ROOT = Path(__file__).resolve().parents[2]
TWO_RANKS = ROOT / "tests" / "fixtures" / "dcp_two_ranks"


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def a_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """As a training script of one's own writes it; gives its weights."""
    model, optimizer = trained()
    torch.save(
        {
            "epoch": 3,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "note": "x",
        },
        path,
    )
    return model.state_dict()


def test_a_checkpoint_of_a_script_comes_back_by_its_paths_through_a_process_of_its_own(
    tmp_path: Path,
) -> None:
    weights = a_checkpoint(tmp_path / "a.ckpt")
    found = foreign.open_foreign(tmp_path / "a.ckpt")
    for name, tensor in weights.items():
        assert torch.equal(found.tensors[f"model/{name}"], tensor), name
        assert found.tensors[f"model/{name}"].dtype == tensor.dtype
    assert "optimizer/state/0/exp_avg" in found.tensors
    assert "rng" in found.tensors
    assert (found.values["epoch"], found.values["note"]) == (3, "x")
    assert found.values["optimizer/param_groups/0/betas"] == [0.9, 0.999]
    assert not found.left_out
    assert foreign.choose_weights(found).keys() == weights.keys()


def test_pieces_of_two_ranks_are_put_together() -> None:
    tensors, values, left_out = child.sort(child.read(TWO_RANKS))
    assert torch.equal(tensors["model/rows"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(
        tensors["model/columns"], torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    )
    assert torch.equal(tensors["model/whole"], torch.tensor([7, 8, 9]))
    assert (values, left_out) == ({"step": 12}, {})


def test_a_piece_that_is_missing_is_told_and_not_filled_with_zeros(tmp_path: Path) -> None:
    for path in TWO_RANKS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    whole = dict(metadata.storage_data)
    for gone in (index for index in whole if index.fqn == "model.rows"):
        metadata.storage_data = {index: info for index, info in whole.items() if index != gone}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(InputError, match=r"lacks parts of a tensor of shape \[5, 3\]"):
            child.read(tmp_path)
    (tmp_path / ".metadata").write_bytes((TWO_RANKS / ".metadata").read_bytes())
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(InputError, match=r"__1_0\.distcp is missing"):
        child.read(tmp_path)
    os.mkfifo(tmp_path / "__1_0.distcp")
    with pytest.raises(InputError, match=r"__1_0\.distcp is .*not a regular file"):
        child.read(tmp_path)


def test_what_is_neither_tensor_nor_plain_value_is_named_and_what_shares_memory_comes_apart(
    tmp_path: Path,
) -> None:
    whole = torch.arange(6.0)
    tree = {
        "a": whole,
        "view": whole[2:4],
        "turned": whole.view(2, 3).T,
        "sparse": torch.eye(3).to_sparse(),
        "__metadata__": whole,
        "list": [1, [2.5, None]],
        "shape": torch.Size([2]),
        "kind": torch.float16,
    }
    torch.save(tree, tmp_path / "a.pt")
    tensors, values, left_out = child.sort(child.read(tmp_path / "a.pt"))
    assert sorted(tensors) == ["a", "turned", "view"]
    assert torch.equal(tensors["turned"], whole.view(2, 3).T)
    assert values == {"list/0": 1, "list/1": [2.5, None], "shape": [2]}
    assert sorted(left_out) == ["__metadata__", "kind", "sparse"]


def test_a_state_nested_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="nested more than"):
        child.sort(endless)
    monkeypatch.setattr(child, "MAX_ENTRIES", 1000)  # a million takes ten seconds
    doubling: Any = [torch.ones(1)]
    for _ in range(40):
        doubling = [doubling, doubling]
    with pytest.raises(InputError, match="more than 1,000 entries"):
        child.sort(doubling)


def tensors_of(*names: str) -> foreign.ForeignFile:
    return foreign.ForeignFile({name: torch.ones(1) for name in names})


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("0.weight", "0.bias"), ("0.weight", "0.bias")),
        (("state_dict/0.weight", "optimizer_states/0/state/0/exp_avg"), ("0.weight",)),
        (("net/a", "rng"), ("a",)),
        (("anything/a", "anything/b/c"), ("a", "b.c")),
        (("module.0.weight", "module.0.bias"), ("module.0.weight", "module.0.bias")),
    ],
)
def test_the_weights_of_a_file_are_found_where_programs_keep_them(
    names: tuple[str, ...], chosen: tuple[str, ...]
) -> None:
    assert tuple(foreign.choose_weights(tensors_of(*names))) == chosen


def test_weights_that_could_be_one_or_another_are_asked_for() -> None:
    found = tensors_of("generator/a", "critic/a")
    with pytest.raises(InputError, match="generator, critic"):
        foreign.choose_weights(found)
    assert list(foreign.choose_weights(found, "critic")) == ["a"]
    with pytest.raises(InputError, match="nothing below 'x'"):
        foreign.choose_weights(found, "x")
    assert list(foreign.choose_weights(tensors_of("module.a", "b"), strip="module.")) == ["a", "b"]
    with pytest.raises(InputError, match="the same name"):
        foreign.choose_weights(tensors_of("module.a", "a"), strip="module.")


def opened(path: Path) -> foreign.ForeignFile:
    """As open_foreign gives it, without a process."""
    return foreign.ForeignFile(*child.sort(child.read(path)), is_flat=child.is_flat(path))


def test_weights_of_which_some_cannot_be_kept_are_refused_and_those_are_named(
    tmp_path: Path,
) -> None:
    lost = {"f": torch.ones(2, dtype=torch.complex128), "g": torch.eye(2).to_sparse()}
    torch.save({"state_dict": {"a": torch.ones(2), **lost}}, tmp_path / "a.pt")
    with pytest.raises(
        InputError, match=r"state_dict/f \(a tensor of torch\.complex128.*state_dict/g \(.*sparse"
    ):
        foreign.choose_weights(opened(tmp_path / "a.pt"))
    torch.save(
        {"model": lost, "optimizer": {"exp_avg": torch.ones(2)}, "kind": torch.float16},
        tmp_path / "a.pt",
    )
    with pytest.raises(InputError, match="model/f"):
        foreign.choose_weights(opened(tmp_path / "a.pt"))
    assert list(foreign.choose_weights(opened(tmp_path / "a.pt"), "optimizer")) == ["exp_avg"]
    torch.save({"a": torch.ones(1), "__metadata__": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"__metadata__ \(a tensor whose name"):
        foreign.choose_weights(opened(tmp_path / "a.pt"))
    many = {f"{number}": lost["f"] for number in range(20)}
    torch.save({**many, "x": 1}, tmp_path / "a.pt")
    with pytest.raises(
        InputError, match=r"no tensors that can be converted, but 0 \(.* and 12 more"
    ):
        foreign.choose_weights(opened(tmp_path / "a.pt"))


def test_what_else_stands_in_a_file_is_told_without_the_weights_themselves(tmp_path: Path) -> None:
    torch.save(
        {
            "model": {"a": torch.ones(1), "count": 3, "kind": torch.float16},
            "optimizer": {"x": torch.ones(1)},
            "epoch": 2,
        },
        tmp_path / "a.pt",
    )
    found = opened(tmp_path / "a.pt")
    assert list(foreign.choose_weights(found)) == ["a"]  # neither of the others is a weight
    assert foreign.list_other_entries(found, "model") == [
        "epoch",
        "model/count",
        "model/kind",
        "optimizer",
    ]
    torch.save({"a": torch.ones(1), "more": {"b": torch.ones(1)}, "epoch": 2}, tmp_path / "a.pt")
    assert foreign.list_other_entries(opened(tmp_path / "a.pt"), "") == ["epoch", "more"]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (
            {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}},
            r"two tensors have the name a\.b",
        ),
        ({"1": torch.ones(1), 1: torch.zeros(1)}, "two entries have the name 1"),
        ({"a": {"b": torch.ones(1)}, "a/b": "text"}, "two entries have the name a/b"),
        ({"a" * 1001: torch.ones(1)}, "1,001 letters, 1,000 are allowed"),
    ],
)
def test_two_tensors_of_one_name_are_refused_and_no_name_is_cut(
    tree: dict[Any, Any], says: str, tmp_path: Path
) -> None:
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(InputError, match=says):
        foreign.choose_weights(opened(tmp_path / "a.pt"))


def test_two_parts_of_a_distributed_checkpoint_at_one_place_are_refused(tmp_path: Path) -> None:
    for path in TWO_RANKS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in (("model", "rows"), ("model", "rows", "below")):
        metadata.planner_data["model.whole"] = place
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(InputError, match="two entries have the name model/rows"):
            child.read(tmp_path)


def shards(folder: Path) -> dict[str, str]:
    """Write a model in two files with their index, as Hugging Face does.

    Gives which file holds which tensor.
    """
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(1)}, folder / file)
    write_index(folder, names)
    return names


def write_index(
    folder: Path, names: dict[str, Any], file: str = "model.safetensors.index.json"
) -> None:
    (folder / file).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_a_model_in_several_files_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    names = shards(tmp_path)
    # the index does not name it
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert sorted(opened(tmp_path).tensors) == ["a", "b"]
    write_index(tmp_path, {**names, "c": names["a"]})
    with pytest.raises(InputError, match=r"00001-of-00002\.safetensors does not contain c"):
        child.read(tmp_path)
    for wrong in ("../x.safetensors", 3):
        write_index(tmp_path, {**names, "c": wrong})
        with pytest.raises(InputError, match="not a plain file name"):
            child.read(tmp_path)
    write_index(tmp_path, names)
    write_index(tmp_path, names, "model.fp16.safetensors.index.json")
    with pytest.raises(
        InputError, match=r"contains model\.fp16\.safetensors\.index\.json and model"
    ):
        child.read(tmp_path)
    (tmp_path / "model.fp16.safetensors.index.json").unlink()
    (tmp_path / names["b"]).unlink()
    with pytest.raises(InputError, match=r"00002-of-00002\.safetensors is missing"):
        child.read(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[1]")
    with pytest.raises(InputError, match="is not an index of weights"):
        child.read(tmp_path)
    index.unlink()
    index.symlink_to("gone")
    with pytest.raises(InputError, match=r"index\.json is missing"):
        child.read(tmp_path)


def test_two_files_of_a_folder_that_hold_one_name_are_refused(tmp_path: Path) -> None:
    for file in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / file)
    with pytest.raises(
        InputError, match=r"one\.safetensors and two\.safetensors .* both contain a"
    ):
        child.read(tmp_path)


@pytest.mark.usefixtures("programs_are_forked")
def test_a_damaged_commit_of_our_own_is_not_given_a_fresh_digest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", 4, {"model": nn.Linear(3, 4)})
    folder = manifest.step_folder(tmp_path / "run", 4)
    copied = shutil.copytree(folder, tmp_path / "copied")
    (tmp_path / "link.safetensors").symlink_to(folder / "model.safetensors")
    assert len(foreign.open_foreign(copied / "model.safetensors").tensors) == 2
    for each in (folder, copied):
        file = each / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.chmod(0o600)
        file.write_bytes(content)
    for path in (
        folder,
        folder / "model.safetensors",
        tmp_path / "link.safetensors",
        copied,
        copied / "model.safetensors",
    ):
        with pytest.raises(RunFolderError, match="is damaged"):
            foreign.open_foreign(path)
    save_file({"a": torch.ones(1)}, copied / "mine.safetensors")
    # no file of the commit
    assert list(foreign.open_foreign(copied / "mine.safetensors").tensors) == ["a"]


@pytest.mark.usefixtures("programs_are_forked")
def test_imported_weights_are_a_commit_that_a_model_loads_and_safetensors_opens(
    tmp_path: Path,
) -> None:
    weights = a_checkpoint(tmp_path / "a.pt")
    found = foreign.open_foreign(tmp_path / "a.pt")
    foreign.import_weights(
        tmp_path / "a.pt",
        tmp_path / "mine",
        foreign.choose_weights(found),
        {"torch": torch.__version__},
    )
    made = commits.check(manifest.step_folder(tmp_path / "mine", 0))
    assert made.parent is not None
    assert made.parent["folder"] == str(tmp_path / "a.pt")
    model = trained()[0]
    checkpoint.load_into(model, tmp_path / "mine", 0)
    for name, tensor in load_file(
        manifest.step_folder(tmp_path / "mine", 0) / "model.safetensors"
    ).items():
        assert torch.equal(tensor, weights[name])
        assert torch.equal(model.state_dict()[name], tensor)
    with pytest.raises(RunFolderError, match="exists already"):
        foreign.import_weights(tmp_path / "a.pt", tmp_path / "mine", weights, {})
    with pytest.raises(
        RunFolderError, match=r"missing: weight, bias.*unexpected: .*1\.running_mean"
    ):
        checkpoint.load_into(nn.Linear(3, 4), tmp_path / "mine", 0)


def test_safetensors_and_a_folder_of_them_are_read_too(tmp_path: Path) -> None:
    model = trained()[0]
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    checkpoint.save(tmp_path / "run", 4, {"model": model, "other": nn.Linear(1, 1)})
    for path in (tmp_path / "a.safetensors", manifest.step_folder(tmp_path / "run", 4)):
        tensors, _, _ = child.sort(child.read(path))
        assert tensors.keys() == model.state_dict().keys()
    with pytest.raises(InputError, match="contains no"):
        child.read(tmp_path / "run")


def test_a_file_that_is_not_there_is_told_before_a_process_is_started(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.pt cannot be read: No such file"):
        foreign.open_foreign(tmp_path / "nothing.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(InputError, match=r"pipe\.pt is neither a file nor a folder"):
        foreign.open_foreign(tmp_path / "pipe.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(InputError, match=r"empty\.pt is empty"):
        foreign.open_foreign(tmp_path / "empty.pt")


def test_files_without_an_end_without_tensors_and_with_slashes_in_names_are_read_as_what_they_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "cut.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2)[:2])
    with pytest.raises(InputError, match="is truncated"):
        child.read(tmp_path / "cut.pt")
    torch.save({"epoch": 3}, tmp_path / "bare.pt")
    with pytest.raises(InputError, match=r"the file contains no tensors\n"):
        foreign.choose_weights(opened(tmp_path / "bare.pt"))
    save_file({"model/w": torch.ones(1), "head": torch.ones(1)}, tmp_path / "flat.safetensors")
    assert sorted(foreign.choose_weights(opened(tmp_path / "flat.safetensors"))) == [
        "head",
        "model/w",
    ]
