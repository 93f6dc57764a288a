"""Prose in Markdown has one sentence a line, and the tool that makes it so changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.runner import ROOT
from tests.docs.sentences import one_a_line

WRITTEN = sorted(
    (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    )
)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_has_one_sentence_a_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = [
        line
        for line, right in zip(text.split("\n"), one_a_line(text).split("\n"), strict=False)
        if line != right
    ]
    assert not wrong[:1], f"python -m tests.docs.sentences {path.relative_to(ROOT)}"


CASES = {
    "two sentences": ("One is here. Another follows.", "One is here.\nAnother follows."),
    "wrapped lines": ("One that is\nwrapped. Another.", "One that is wrapped.\nAnother."),
    "a list item": ("- One. Two.\n  Three.\n- Four.", "- One.\n  Two.\n  Three.\n- Four."),
    "a numbered item": ("1. One. Two.", "1. One.\n   Two."),
    "inside brackets": (
        "Read it (once. Or twice) and go. Then stop.",
        "Read it (once. Or twice) and go.\nThen stop.",
    ),
    "code": ("Set `a. B` first. Then go.", "Set `a. B` first.\nThen go."),
    "an abbreviation": ("Some, e.g. Adam, do.", "Some, e.g. Adam, do."),
    "a decimal": ("It took 1.5 s. Then 2 s.", "It took 1.5 s.\nThen 2 s."),
    "a label": ("**Claim.** It holds. Always.", "**Claim.** It holds.\nAlways."),
    "a quotation": ('It says "No. Never." Then it ends.', 'It says "No. Never."\nThen it ends.'),
}
KEPT = [
    "# A heading. With two.",
    "| a. B | c. D |",
    "```\none. Two.\n```",
    "<!-- a. B -->",
    "> Quoted. Twice.",
    "Broken.  \nHere.",
]


@pytest.mark.parametrize("what", CASES)
def test_sentences_are_split_where_they_end(what: str) -> None:
    text, wanted = CASES[what]
    assert one_a_line(text) == wanted
    assert one_a_line(wanted) == wanted


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_prose_stays(text: str) -> None:
    assert one_a_line(text) == text
