"""WikiText-2: next-word prediction on Wikipedia articles with a small decoder-only transformer.

S. Merity et al., "Pointer Sentinel Mixture Models", 2016. A token is a word; the vocabulary has the
33,278 words of the training split. The splits train, valid and test have 2,088,628, 217,646 and
245,569 tokens, including one for each line end.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from surefoot.components.data.sources.tokens import Tokens
from surefoot.components.metrics import Mean, perplexity
from surefoot.contract.task import Loss
from surefoot.core.errors import DataError
from surefoot.core.place import whole_path
from surefoot.tasks.transformer import HiddenAndHead, Transformer, nats

__all__ = ["WikiText2"]

SPLITS = {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
LINE_END, UNKNOWN = "<eos>", "<unk>"


class WikiText2:
    """Next-word prediction on windows of `length` words.

    Batches are dict(inputs (B, T), targets (B, T)); target -100 is ignored. With `chunked_loss`
    training computes head and loss for a few words at a time, without the logits of a whole batch.
    `folder` holds the token files, or a folder `wikitext-2` that does. Raises DataError for files
    that are missing, empty or not UTF-8.
    """

    unit = "tokens"

    def __init__(
        self,
        folder: str | None = None,
        *,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        length: int = 256,
        dropout: float = 0.1,
        chunked_loss: bool = False,
    ) -> None:
        self.folder, self.length = None if folder is None else str(whole_path(folder)), length
        self.layers, self.width, self.heads, self.dropout = layers, width, heads, dropout
        self.chunked_loss = chunked_loss
        self._words: dict[str, int] = {}
        self._sources: dict[str, Tokens] = {}

    def model(self) -> nn.Module:
        vocabulary = len(self.words())
        return Transformer(
            vocabulary,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            length=self.length,
            dropout=self.dropout,
            chunked_loss=self.chunked_loss,
        )

    def data(self, split: str) -> Tokens:
        if split not in self._sources:
            words = self.words()
            self._sources[split] = Tokens(
                _ids(_read(self.folder, split), words, SPLITS[split]), self.length
            )
        return self._sources[split]

    def words(self) -> dict[str, int]:
        """Return the vocabulary: a mapping of words to ids.

        The most frequent word of the training split has id 0. Words with equal frequency are sorted
        alphabetically.
        """
        if not self._words:
            counts = Counter(_read(self.folder, "train"))
            ranked = sorted(counts, key=lambda word: (-counts[word], word))
            self._words = {word: number for number, word in enumerate(ranked)}
        return self._words

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor | HiddenAndHead:
        output: Tensor | HiddenAndHead = model(batch["inputs"])
        return output

    def loss(self, output: Tensor | HiddenAndHead, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(*nats(output, batch["targets"]))

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        return {"perplexity": perplexity(*nats(output, batch["targets"]))}


def _read(folder: str | None, split: str) -> list[str]:
    """Return the words of a split in order, with `<eos>` after each line."""
    if split not in SPLITS:
        raise DataError(f"wikitext2 has no split {split!r}", hint=f"use one of {', '.join(SPLITS)}")
    path = _find(folder) / SPLITS[split]
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {error.start} is not text",
            hint="copy the file again, or convert it to UTF-8",
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            hint=f"the folder must hold {', '.join(SPLITS.values())}",
        ) from None
    words = text.replace("\n", f" {LINE_END} ").split()
    if len(words) < 2:
        raise DataError(f"{path} is empty: there is no word to predict", hint="copy the file again")
    return words


def _find(folder: str | None) -> Path:
    if folder is None:
        raise DataError(
            "wikitext2 needs the folder of its token files",
            hint="name it with --data DIR, or [data] folder",
        )
    given = Path(folder).expanduser()
    found = next(
        (path for path in (given, given / "wikitext-2") if (path / SPLITS["train"]).exists()), None
    )
    if found is None:
        raise DataError(
            f"there is no {SPLITS['train']} in {given} or {given / 'wikitext-2'}",
            hint="name the folder of the token files",
        )
    return found


def _ids(tokens: list[str], words: dict[str, int], name: str) -> np.ndarray:
    """Return the id of each token as int32.

    A word that is not in the training split gets the id of `<unk>`. Raises DataError if there is no
    such id.
    """
    unknown = words.get(UNKNOWN, -1)
    ids = np.fromiter(
        (words.get(token, unknown) for token in tokens), dtype=np.int32, count=len(tokens)
    )
    if ids.min() < 0:
        raise DataError(
            f"{name} has the word {tokens[int(ids.argmin())]!r}, which the training split has not",
            hint=f"write it as {UNKNOWN} in both",
        )
    return ids
