"""WikiText-2: what is read, how words become numbers, how bad files are refused.

And that the transformer learns from them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from surefoot import Run
from surefoot.components.optim.groups import find_trained
from surefoot.contract import spec_file
from surefoot.core.errors import DataError
from surefoot.tasks.transformer import CHUNK_ELEMENTS, Transformer, nats
from surefoot.tasks.wikitext2 import SPLITS, WikiText2

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
SMALL = {"layers": 1, "width": 32, "heads": 2, "length": 32, "dropout": 0.0}


@pytest.fixture(scope="module")
def task(wikitext2_folder: Path) -> WikiText2:
    return WikiText2(str(wikitext2_folder), layers=1, width=32, heads=2, length=100)


@pytest.fixture(scope="module")
def excerpt(wikitext2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first lines of the real splits, under the set's own name in another folder."""
    folder = tmp_path_factory.mktemp("data") / "wikitext-2"
    folder.mkdir()
    for name, lines in zip(SPLITS.values(), (300, 40, 40), strict=True):
        with (wikitext2_folder / name).open(encoding="utf-8") as file:
            (folder / name).write_text(
                "".join(file.readline() for _ in range(lines)), encoding="utf-8"
            )
    return folder


def write(
    folder: Path,
    train: bytes = b"a b <unk> \n c\n",
    valid: bytes = b"a c\n",
    test: bytes = b"b\n c\n",
) -> Path:
    for name, content in zip(SPLITS.values(), (train, valid, test), strict=True):
        (folder / name).write_bytes(content)
    return folder


def test_the_splits_have_the_official_numbers_of_tokens_and_the_vocabulary_33278_words(
    task: WikiText2,
) -> None:
    assert len(task.words()) == 33_278
    counts = {
        split: int(task.data(split).describe().split()[0].replace(",", "")) for split in SPLITS
    }
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}


def test_every_token_of_a_split_but_the_first_is_a_target_once(task: WikiText2) -> None:
    source = task.data("valid")
    targets = source.read(np.arange(len(source)))["targets"]
    assert int((targets != -100).sum()) == 217_645


def test_words_are_numbered_by_frequency_so_the_numbers_do_not_depend_on_the_order_of_the_articles(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, train=b"the cat \n the dog \n")
    assert WikiText2(str(folder)).words() == {"<eos>": 0, "the": 1, "cat": 2, "dog": 3}
    write(tmp_path, train=b"the dog \n the cat \n")
    assert WikiText2(str(folder)).words() == {"<eos>": 0, "the": 1, "cat": 2, "dog": 3}


def test_a_word_that_training_does_not_know_is_unk_and_refused_where_there_is_no_unk(
    tmp_path: Path,
) -> None:
    task = WikiText2(str(write(tmp_path, valid=b"a zebra\n")), length=2)
    assert task.data("valid").read(np.array([0]))["targets"].tolist() == [
        [task.words()["<unk>"], task.words()["<eos>"]]
    ]
    task = WikiText2(str(write(tmp_path, train=b"a b\n", valid=b"a zebra\n")))
    with pytest.raises(DataError, match="'zebra'"):
        task.data("valid")


def test_the_set_is_found_in_its_own_folder_and_in_its_parent(excerpt: Path) -> None:
    assert (
        WikiText2(str(excerpt)).data("test").digest
        == WikiText2(str(excerpt.parent)).data("test").digest
    )


def test_a_folder_that_is_not_named_or_holds_nothing_and_an_unknown_split_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="--data DIR"):
        WikiText2().data("train")
    with pytest.raises(DataError, match=r"no wiki\.train\.tokens in"):
        WikiText2(str(tmp_path)).data("train")
    with pytest.raises(DataError, match="use one of train, valid, test"):
        WikiText2(str(write(tmp_path))).data("dev")
    (tmp_path / SPLITS["valid"]).unlink()
    with pytest.raises(DataError, match=r"wiki\.valid\.tokens cannot be read: No such file"):
        WikiText2(str(tmp_path)).data("valid")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is empty"), (b" \t", "is empty"), (b"caf\xe9 \n", "is not UTF-8: byte 3")],
)
def test_a_token_file_that_is_empty_or_not_utf_8_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"wiki\.train\.tokens {reason}"):
        WikiText2(str(write(tmp_path, train=content))).data("train")
    with pytest.raises(DataError, match=rf"wiki\.valid\.tokens {reason}"):
        WikiText2(str(write(tmp_path, valid=content))).data("valid")


def test_the_transformer_does_not_see_the_words_that_it_predicts() -> None:
    torch.manual_seed(0)
    model = Transformer(50, layers=2, width=16, heads=2, length=12)
    for parameter in model.parameters():
        # the parts begin as the identity, which sees nothing
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 50, (1, 12))
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 50
    difference = (model(ids) - model(changed)).detach().abs().amax(-1)[0]
    assert difference[:7].tolist() == [0.0] * 7
    assert float(difference[7:].min()) > 0.0


def test_the_transformer_sees_the_order_of_the_words() -> None:
    torch.manual_seed(0)
    model = Transformer(50, layers=1, width=16, heads=2, length=9)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    first, swapped = (model(torch.tensor([ids]))[0, -1].detach() for ids in ([3, 4, 5], [4, 3, 5]))
    assert float((first - swapped).abs().max()) > 1e-3


def test_embedding_and_head_are_one_matrix_that_muon_leaves_to_adamw_and_takes_all_others() -> None:
    trained = find_trained(Transformer(50, layers=2, width=16, heads=2, length=8))
    assert {each.name: each.kind for each in trained if each.kind != "matrix"} == {
        "embedding.weight": "embedding"
    }
    assert len([each for each in trained if each.kind == "matrix"]) == 12


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of twice the heads"):
        Transformer(50, layers=2, width=18, heads=4, length=8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_summed_loss_and_its_gradient_equal_torch_s_cross_entropy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vocabulary = CHUNK_ELEMENTS // 3  # three rows at a time: several chunks, the last one short
    logits = (2.0 * torch.randn(2, 5, vocabulary)).to(dtype)
    targets = torch.randint(0, vocabulary, (2, 5))
    targets[1, 3:] = -100
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    total, count = nats(mine, targets)
    wide = theirs if dtype == torch.float64 else theirs.float()
    expected = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (total / 7).backward()
    (expected / 7).backward()
    assert int(count) == 8
    torch.testing.assert_close(
        total, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0.0
    )
    assert mine.grad is not None
    assert theirs.grad is not None
    # the two sum in a different order; in bf16 both round the same fp32 gradient, at most one unit
    # in the last of 8 bits apart
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=TOLERANCE[dtype], atol=1e-12)


def test_a_small_transformer_learns_which_words_are_frequent_within_80_short_steps(
    excerpt: Path, tmp_path: Path
) -> None:
    changes = [(f"task.{name}", value, "") for name, value in SMALL.items()]
    changes += [
        ("data.folder", str(excerpt), ""),
        ("train.length", "80 steps", ""),
        ("train.batch", 4, ""),
        ("optim.lr", 0.02, ""),
    ]
    changes += [("schedule.warmup", "5 steps", ""), ("evaluate.batch", 64, "")]
    with Run(spec_file.read("wikitext2", changes).spec, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        reached = run.evaluate().metrics["perplexity"]
    task = WikiText2(str(excerpt))
    train, valid = (
        task.data(split).read(np.arange(len(task.data(split))))["targets"].flatten()
        for split in ("train", "valid")
    )
    counts = torch.bincount(train[train >= 0], minlength=len(task.words())) + 1.0
    frequencies = -(counts / counts.sum()).log()[valid[valid >= 0]].mean()
    assert reached < float(frequencies.exp())
