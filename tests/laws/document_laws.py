"""Laws of documents: what they say of the code is so, and each promise has its test."""

from __future__ import annotations

from tests.laws import features, living_copy, security, words
from tests.laws.law import MAIN, Law, Plant

VERBS = "words = sys.argv[1:]\n    sys.exit(0 if words[0] in ('--help', 'train') else 2)"
GOOD_ROW = "| BAT-01 | it trains | `surefoot train digits` | `tests/test_a.py::test_it` |\n"
HEAD = "| id | what | command | test |\n| --- | --- | --- | --- |\n"
A_TEST = {
    "tests/test_a.py": "def test_it(): ...\n",
    "surefoot/cli/main.py": MAIN.format(body=VERBS),
}
F = "docs/reference/features.md"
PRIVATE = (
    "\n## Private torch APIs\n\n| what | seam | gone | held by |\n"
    "| `torch._x` | `train/a.py` | slow | `tests/test_a.py` |\n"
)
PROMISES = "\n## What holds today\n\n| promise | held by |\n| --- | --- |\n{row}\n"
ROOMS = "\n## The rooms\n\n| room | what |\n| --- | --- |\n{row}\n\n## Next\n"
PROJECT = (
    "[project]\ndependencies = ['torch>=2.11']\noptional-dependencies = {images = ['pillow']}\n"
)
NEEDS = (
    "\n## Dependencies\n\n| package | extra | why |\n| --- | --- | --- |\n"
    "| `torch` | | runs |\n| `pillow` | images | decodes |\n"
)

DOCUMENT_LAWS: dict[str, Law] = {
    "the architecture's rooms are the real ones": Law(
        living_copy.rooms,
        (
            Plant(
                "no line for the room train",
                {"surefoot/train/run.py": "", "docs/architecture.md": ROOMS.format(row="")},
            ),
            Plant(
                "no line for the room core/a",
                {"surefoot/core/a.py": "", "docs/architecture.md": ROOMS.format(row="")},
            ),
            Plant(
                "train is told as later",
                {
                    "surefoot/train/a.py": "",
                    "docs/architecture.md": ROOMS.format(row="| `train` | later: x |"),
                },
            ),
            Plant(
                "train is told, and does not",
                {"docs/architecture.md": ROOMS.format(row="| `train` | steps |")},
            ),
        ),
        {
            "surefoot/train/a.py": "",
            "docs/architecture.md": ROOMS.format(
                row="| `train` | steps |\n| `tune` | later: searches |"
            ),
        },
    ),
    "each private part of torch has a seam and a test": Law(
        living_copy.private_apis,
        (
            Plant("no seam train/a.py", {**A_TEST, "docs/architecture.md": PRIVATE}),
            Plant(
                "no test holds `torch._x`",
                {"surefoot/train/a.py": "", "docs/architecture.md": PRIVATE},
            ),
        ),
        {**A_TEST, "surefoot/train/a.py": "", "docs/architecture.md": PRIVATE},
    ),
    "each dependency has its reason": Law(
        living_copy.dependencies,
        (
            Plant(
                "why torch",
                {
                    "pyproject.toml": PROJECT,
                    "docs/architecture.md": NEEDS.replace("`torch`", "`other`"),
                },
            ),
            Plant(
                "other is no dep",
                {
                    "pyproject.toml": PROJECT,
                    "docs/architecture.md": NEEDS + "| `other` | x | y |\n",
                },
            ),
        ),
        {"pyproject.toml": PROJECT, "docs/architecture.md": NEEDS},
    ),
    "security promises nothing without a test": Law(
        security.promises,
        (
            Plant("without a test", {"SECURITY.md": PROMISES.format(row="| it is safe | |")}),
            Plant(
                "there is no test",
                {"SECURITY.md": PROMISES.format(row="| it is safe | `tests/test_gone.py` |")},
            ),
            Plant("promises nothing", {"SECURITY.md": "all is well"}),
        ),
        {
            **A_TEST,
            "SECURITY.md": PROMISES.format(row="| it is safe | `tests/test_a.py::test_it` |"),
        },
    ),
    "no word that belongs to one machine": Law(
        words.words,
        (
            Plant("path of one machine", {"docs/a.md": "see /wo" + "rk/main\n"}),
            Plant("path of one machine", {"surefoot/core/a.py": "x = '/tm" + "p/x'\n"}),
            Plant("note to oneself", {"README.md": "TO" + "DO\n"}),
            Plant("registry", {"Makefile": "x: # from py" + "pi.org\n"}),
        ),
        {"docs/a.md": "the work/ of others, https://example.org/work/x, todo lists\n"},
    ),
    "a row of what works names a verb and a test that exist": Law(
        features.features,
        (
            Plant("is missing", {"docs/a.md": ""}),
            Plant(
                "there is no verb fly",
                {**A_TEST, F: HEAD + GOOD_ROW.replace("surefoot train", "surefoot fly")},
            ),
            Plant(
                "there is no test", {**A_TEST, F: HEAD + GOOD_ROW.replace("test_it", "test_other")}
            ),
            Plant("there is no test", {**A_TEST, F: HEAD + GOOD_ROW.replace("test_a", "test_b")}),
            Plant("not of the form", {**A_TEST, F: HEAD + GOOD_ROW + GOOD_ROW}),
            Plant("not of the form", {**A_TEST, F: HEAD + GOOD_ROW.replace("BAT-01", "BAT-1")}),
            Plant(
                "has 3 cells", {**A_TEST, F: HEAD + "| BAT-01 | it trains | `tests/test_a.py` |\n"}
            ),
            Plant(
                "names no command",
                {**A_TEST, F: HEAD + GOOD_ROW.replace("`surefoot train digits`", "run it")},
            ),
        ),
        {**A_TEST, F: HEAD + GOOD_ROW},
    ),
}
