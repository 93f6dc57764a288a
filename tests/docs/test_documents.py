"""Every command and snippet of the README and of docs/ runs; every link leads somewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.runner import ROOT, Forge, Reader

DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
LINKED = sorted((*DOCUMENTS, *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("examples/**/*.md")))
GUIDES = (
    "compile",
    "data",
    "exact-resume",
    "ladder",
    "large-batches",
    "loading",
    "memory",
    "precision",
    "profiling",
    "report",
    "several-ranks",
)
REFERENCES = ("checkpoints", "cli", "run-folder")
LONG = {"docs/concepts/roofline.md"}
LONG |= {f"docs/guides/{name}.md" for name in GUIDES}
LONG |= {f"docs/reference/{name}.md" for name in REFERENCES}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _marks(path: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if _name(path) in LONG else []


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as made:
        yield made


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=_marks(path), id=_name(path)) for path in DOCUMENTS]
)
def test_all_that_a_document_shows_runs(path: Path, forge: Forge, tmp_path: Path) -> None:
    data = (ROOT / os.environ.get("DATA", "../shared/data")).resolve()
    reader = Reader(forge, tmp_path / "reader", data if data.is_dir() else None, _name(path))
    failures = reader.read(path.read_text(encoding="utf-8"))
    assert not failures, "\n".join(failures)
    if reader.left_out:
        pytest.skip(f"without the data sets (set DATA) not run: {', '.join(reader.left_out)}")


@pytest.mark.parametrize("path", LINKED, ids=_name)
def test_every_link_of_a_document_leads_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []


BROKEN = {
    "a snippet that raises": ("```python\n1 / 0\n```\n", "the snippet ended with 1"),
    "a command that fails": ("```console\n$ false\n```\n", "`false` ended with 1"),
    "a command that is not there": (
        "```console\n$ surefoot no-such-verb\n```\n",
        "`surefoot no-such-verb` ended with 2",
    ),
    "the first of two commands": (
        "```console\n$ surefoot no-such-verb\n$ surefoot --help\n```\n",
        "ended with 2, 0 was expected",
    ),
    "a failure inside a pipe": ("```bash\nfalse | cat\n```\n", "ended with 1"),
    "a file that is missing": ("```console\n$ cat made_elsewhere.txt\n```\n", "ended with 1"),
    "a session that answers otherwise": (
        "```python\n>>> 1 + 1\n3\n```\n",
        "the snippet ended with 1",
    ),
    "a table that is no TOML": ("```toml\n[optim\n```\n", "is no TOML"),
    "a spec with an unknown key": (
        "<!-- file: a.toml -->\n```toml\n[nonsense]\nx = 1\n```\n",
        "refused by surefoot spec check",
    ),
    "output that is not there": (
        "<!-- output: checked -->\n```console\n$ echo score 7\nscore 8\n```\n",
        "'score 8' is not in the output",
    ),
    "success where a failure is announced": (
        "<!-- exits: 2 -->\n```console\n$ true\n```\n",
        "ended with 0, 2 was expected",
    ),
    "an exemption without a reason": (
        "<!-- not run: no -->\n```console\n$ true\n```\n",
        "gives no reason",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_snippet_is_caught(what: str, forge: Forge, tmp_path: Path) -> None:
    text, says = BROKEN[what]
    failures = Reader(forge, tmp_path / "reader", None).read(text)
    assert len(failures) == 1, failures
    assert says in failures[0]


RIGHT = """
<!-- file: my_numbers.py -->
```python
NUMBERS = (1, 2, 3)
```

A later snippet sees the file, and so does a command.

```python
from my_numbers import NUMBERS
assert sum(NUMBERS) == 6
```

<!-- output: checked -->
```console
$ python -c "import my_numbers; print('sum', sum(my_numbers.NUMBERS), 'in', 12.5, 's')"
sum 6 in ... s
$ echo a \\
>   b
a b
```

- in a list:

  ```python
  >>> [n for n in range(3)]
  [0, 1, 2]
  ```

<!-- file: quick.toml -->
```toml
base = "digits"
[train]
length = "2 epochs"
```

<!-- exits: 2 -->
```console
$ surefoot no-such-verb
```

<!-- not run: this one would never end -->
```console
$ sleep infinity
```

```console
$ surefoot --help | grep -c train
```

```text
not code at all
```
"""


def test_what_is_right_passes_and_what_is_exempt_is_left_alone(
    forge: Forge, tmp_path: Path
) -> None:
    assert Reader(forge, tmp_path / "reader", None).read(RIGHT) == []


def test_without_the_data_sets_only_what_needs_them_is_left_out(
    forge: Forge, tmp_path: Path
) -> None:
    reader = Reader(forge, tmp_path / "reader", None, "a.md")
    assert reader.read("```console\n$ ls ../shared/data\n```\n\n```console\n$ true\n```\n") == []
    assert reader.left_out == ["a.md:1"]


MAKES = "```console\n$ cp -r ../shared/data/small made\n```\n"
USES = "<!-- needs: made -->\n```console\n$ ls made\n```\n"
# what a document shows -> the lines that are left out where the set `small` is there, where another
# is, where none is
SETS = {
    "a block that uses what another made": (f"{MAKES}{USES}", ([], [1, 5], [1, 5])),
    "one that uses what is there": (
        f"```console\n$ mkdir made\n```\n{MAKES}{USES}",
        ([], [4], [4]),
    ),
    "a set among others": (
        "```console\n$ ls ../shared/data/small ../shared/data\n```\n",
        ([], [1], [1]),
    ),
    "the folder itself": ("```console\n$ ls ../shared/data\n```\n", ([], [], [1])),
}


@pytest.mark.parametrize("what", SETS)
def test_what_needs_a_set_that_is_not_there_is_left_out_with_all_that_follows_from_it(
    what: str, forge: Forge, tmp_path: Path
) -> None:
    text, wanted = SETS[what]
    for name, lines in zip(("small", "other", None), wanted, strict=True):
        data = None if name is None else tmp_path / f"data-{name}"
        if data is not None:
            (data / str(name)).mkdir(parents=True)
        reader = Reader(forge, tmp_path / f"reader-{name}", data, "a.md")
        assert reader.read(text) == []
        assert reader.left_out == [f"a.md:{line}" for line in lines]


def test_a_block_whose_need_is_not_met_though_nothing_was_left_out_fails(
    forge: Forge, tmp_path: Path
) -> None:
    assert len(Reader(forge, tmp_path / "reader", None).read(USES)) == 1
