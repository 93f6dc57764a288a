"""Tests of `surefoot report`.

One page of a run or several, whatever names a stranger chose, read by a browser where there is one.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest

from surefoot.cli.look import past as past_run
from surefoot.cli.look.report import rows_of, write_page
from surefoot.contract import events
from surefoot.contract.events import Committed
from surefoot.control.report import ReportPage, read_ladder, read_profile, render
from surefoot.control.report.page import sanitize
from surefoot.core.errors import InputError
from tests.cli import past_runs as past
from tests.cli.conftest import Command
from tests.cli.past_profile import write_ladder, write_profile


@pytest.fixture(scope="module", autouse=True)
def templates_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not for each page, which takes longer than the rest of it."""
    kept = jinja2.FileSystemBytecodeCache(str(tmp_path_factory.mktemp("templates")))
    made = functools.partial(jinja2.Environment, bytecode_cache=kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2, "Environment", made)
        yield


HOSTILE = {
    "a script": "<script>window.hostile = 1</script>",
    "the end of an attribute": (
        '"><img src=x onerror="window.hostile = 1"><svg onload=\'window.hostile = 1\'>'
    ),
    "the end of the style": "</style></title></svg><script>window.hostile = 1</script>",
    "a template": "{{ 7 * 7 }}{% raw %}",
    "direction marks": "exp\u202egpj.exe\u2066\u200f",
    "half of a letter": "a\ud800b\x00c\x1b[31m",
    "ten thousand letters": "W" * 10_000,
    "an address": "javascript:window.hostile=1 https://example.org/x.png",
}

# what the page is made of; everything else in it would be a stranger's
TAGS = {"html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "div"}
TAGS |= {"p", "h1", "h2", "h3", "h4", "code", "pre", "a", "dl", "dt", "dd", "ul", "li"}
TAGS |= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
TAGS |= {"figure", "figcaption", "img", "svg", "path", "rect", "g", "circle", "text"}
ATTRIBUTES = {
    "lang",
    "charset",
    "http-equiv",
    "content",
    "name",
    "id",
    "class",
    "href",
    "src",
    "alt",
}
ATTRIBUTES |= {"aria-label", "aria-hidden", "role", "tabindex", "scope"}
ATTRIBUTES |= {"width", "height", "viewbox", "x", "y", "d", "r", "text-anchor", "transform"}


class Seen(HTMLParser):
    """The tags, attributes and words of a page, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: set[str] = set()
        self.words: list[str] = []
        self.sections: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {
            (value or "").partition(",")[0] for name, value in attrs if name in ("href", "src")
        }
        self.sections += [value or "" for name, value in attrs if tag == "section" and name == "id"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def says(self, text: str) -> bool:
        return " ".join(text.split()) in " ".join(" ".join(self.words).split())


PHASES = {"data": 0.1, "forward": 0.15, "backward": 0.2, "other": 0.05}


def committed(number: int) -> Committed:
    return Committed(
        generation=1,
        time_s=past.BEGAN_S,
        step=number,
        folder=f"checkpoints/{number}",
        num_bytes=3 << 20,
        elapsed_s=0.2,
        waited_s=0.001,
    )


def write_whole(folder: Path, name: str = "digits") -> Path:
    """A run with a record of every kind and a whole profile.

    `name` stands wherever a stranger may choose one.
    """
    spec = {**past.SPEC, "task": {"use": name}, "optim": {"lr": 0.005, "note": name}}
    changes = {
        "task": name,
        "versions": {name: name},
        "variables": {name: name},
        "command": ("surefoot", "train", name),
        "notes": (name,),
    }
    steps = [
        replace(past.step(number, 3.0 / number), phases=PHASES, step_s=(0.05,) * 10)
        for number in (1, 10, 20, 30)
    ]
    slow = {"step": 33, "elapsed_s": 0.4, "cause": name}
    steps.append(replace(past.step(40, 0.075), phases=PHASES, step_s=(0.05,) * 9, outliers=(slow,)))
    row = json.loads(past.evaluated(40, 0.994).as_line())
    named = {**row, "metrics": {name: 0.994}, "score": name, "units": {name: "%"}}
    fault = {**json.loads(past.fault(15).as_line()), "fault": name, "detail": name, "action": name}
    records = [past.started(spec=spec, **changes), *steps, committed(20), committed(40)]
    run = past.write(folder, [*records, past.ended(40, cause=name)], torn="")
    with (run / events.FILE).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in (named, fault))
    write_profile(run, name=name, inside=name if "\x00" not in name else "")
    return run


def seen(file: Path) -> Seen:
    return Seen(file.read_text(encoding="utf-8"))


def test_a_run_is_one_page_with_every_part(surefoot: Command) -> None:
    run, ladder = write_whole(Path("runs/a")), write_ladder(Path("climbed"))
    (run / "spec.toml").touch()
    answer = surefoot("report", run, "--ladder", ladder)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("runs/a/report.html  ")
    page = seen(run / "report.html")
    assert page.sections == [
        "summary",
        "curves",
        "time",
        "ladder",
        "roofline",
        "operators",
        "memory",
        "flame",
        "saves",
        "environment",
        "again",
    ]
    for part in (
        "digits: finished, digits 99.4 %",
        "1.28 k samples/s",
        "norm before clipping",
        "best 99.4 at step 40",
        "backward 1 s 40 %",
        "33 400 ms digits",
        "productive",
        "REJECTED",
        "0.8 (0.77 to 0.83)",
        "skipped n/a n/a n/a n/a no GPU here",
        "accuracy 99.4 % (start 99.2 %)",
        "optim.fused=true",
        "fp32 90 GFLOP/s",
        "model FLOPs of a sample x",
        "aten::relu",
        "30 MiB",
        "52.63 %",
        "To zoom, open",
        "3 MiB",
        "a processor, 2 cores, 16 GiB",
        "surefoot train runs/a/spec.toml",
        "time that training waited",
    ):
        assert page.says(part), part


def test_nothing_in_the_page_is_run_or_fetched(surefoot: Command) -> None:
    surefoot("report", write_whole(Path("a")), "--ladder", write_ladder(Path("climbed")))
    page, text = seen(Path("a/report.html")), Path("a/report.html").read_text()
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert {each for each in page.addresses if not each.startswith("#")} == {
        "data:image/svg+xml;base64"
    }
    policy = text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_name_is_only_words(kind: str, surefoot: Command) -> None:
    name = HOSTILE[kind]
    run = write_whole(Path("a"), name)
    answer = surefoot("report", run, "--ladder", write_ladder(Path("climbed"), name=name))
    assert (answer.code, answer.err) == (0, "")
    page, text = seen(run / "report.html"), (run / "report.html").read_text()
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert not set(text) & set("\u202e\u2066\u200f\x00\x1b")
    assert page.says(sanitize(name)[:60])
    # the command and the spec alone stay whole
    assert len(re.findall("W{301,}", text)) == (3 if kind == "ten thousand letters" else 0)


def test_two_runs_lie_side_by_side_and_what_differs_is_told(surefoot: Command) -> None:
    for name, lr in (("a", 0.005), ("b", 0.01)):
        past.write_finished(Path("runs") / name, lr=lr)
    assert surefoot("report", "runs/a", "runs/b").code == 0
    page = seen(Path("runs/a/compared.html"))
    assert page.says("2 runs side by side")
    assert page.says("optim.lr 0.005 0.01")
    for label in (
        "runs/a, training",
        "runs/b, training",
        "runs/a, test split",
        "runs/b, accuracy: best 99.4 at step 40",
    ):
        assert page.says(label), label
    past.write_finished(Path("runs/c"))
    assert surefoot("report", "runs/a", "runs/c", "--out", "same.html").code == 0
    assert seen(Path("same.html")).says(
        "what is recorded of spec, versions, machine, code and data is equal"
    )


def test_what_is_not_there_is_left_out_or_said(surefoot: Command) -> None:
    run = past.write(Path("a"), [past.started(), past.step(10, None)])
    assert surefoot("report", run).code == 0
    page = seen(Path("a/report.html"))
    assert page.sections == [
        "summary",
        "curves",
        "time",
        "memory",
        "profile",
        "saves",
        "environment",
        "again",
    ]
    assert page.says("400 MiB, 2.441 % of 16 GiB (this host): there is room for a larger batch")
    assert page.says("operators, roofline, memory and flame graph are n/a")
    assert page.says("no end is recorded")
    assert page.says("no checkpoint was saved")
    assert not page.says("Loss")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"version": 9}', "is of version 9"),
        ('{"version": 1, "x": ' + "[" * 10**5, ""),
    ],
    ids=("torn", "a list", "newer", "nested"),
)
@pytest.mark.parametrize("name", ["operators.json", "roofline.json", "memory.json"])
def test_a_damaged_part_of_a_profile_is_named_and_the_rest_is_shown(
    text: str, told: str, name: str, surefoot: Command
) -> None:
    run = write_whole(Path("a"))
    (run / "profile" / name).write_text(text)
    assert surefoot("report", run).code == 0
    page = seen(run / "report.html")
    # its section has the peak of the run, too
    assert name.partition(".")[0] not in page.sections or name == "memory.json"
    assert page.says(f"a/profile/{name} is")
    assert page.says(told)
    assert "flame" in page.sections


JUNK: tuple[Any, ...] = (
    None,
    "x",
    -1,
    0,
    10**400,
    1e308,
    "nan",
    [],
    {},
    {"a": {"b": []}},
    [[]],
    [{}],
    [None, "x"],
)


@pytest.mark.quick("operators.json", "memory.json")
@pytest.mark.parametrize("name", ["operators.json", "roofline.json", "memory.json", "ladder.json"])
def test_values_of_any_type_break_no_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_whole(Path("a"))
    path = write_ladder(Path("climbed")) / name if name == "ladder.json" else run / "profile" / name
    whole, whole_rows = json.loads(path.read_text()), rows_of(past_run.read(run))
    for key in whole:
        for junk in JUNK:
            path.write_text(json.dumps({**whole, key: junk}))
            rows = replace(whole_rows, profile=read_profile(run))
            if name != "ladder.json":
                assert render(ReportPage(runs=[rows])).endswith("</html>")
            elif key != "version":
                assert render(
                    ReportPage(runs=[rows], ladder=read_ladder(Path("climbed")))
                ).endswith("</html>")


def test_numbers_that_are_not_finite_are_counted_and_left_out(surefoot: Command) -> None:
    run = past.write(
        Path("a"),
        [
            past.started(),
            *(past.step(number, number) for number in (1, 2)),
            past.step(3, float("nan")),
        ],
    )
    with (run / events.FILE).open("a") as file:
        row = json.loads(past.step(4, 1e305).as_line())
        file.write(
            json.dumps({**row, "samples_per_s": "inf", "elapsed_s": "nan", "gradient_norm": "nan"})
            + "\n"
        )
    assert surefoot("report", run).code == 0
    assert seen(run / "report.html").says("2 values that are not finite left out")


def test_the_same_run_gives_the_same_bytes(surefoot: Command) -> None:
    run = write_whole(Path("a"))
    surefoot("report", run, "--out", "one.html")
    surefoot("report", run, "--out", "two.html")
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()


def test_the_page_of_a_run_is_renewed_and_a_named_one_is_never_overwritten(
    surefoot: Command,
) -> None:
    run = past.write_finished(Path("a"))
    first = surefoot("report", run, "--json").row
    assert first == {
        "file": "a/report.html",
        "num_bytes": Path("a/report.html").stat().st_size,
        "runs": ["a"],
    }
    assert surefoot("report", run).code == 0
    Path("mine.html").write_text("mine")
    answer = surefoot("report", run, "--out", "mine.html")
    assert (answer.code, Path("mine.html").read_text()) == (2, "mine")
    assert "mine.html already exists and is not overwritten" in answer.err
    # one that came after the look
    with pytest.raises(InputError, match="cannot be written: File exists"):
        write_page(Path("mine.html"), b"page", is_new=True)
    assert Path("mine.html").read_text() == "mine"
    assert sorted(path.name for path in run.iterdir()) == ["events.jsonl", "report.html"]


BAD = {
    "no run": (("nowhere",), "nowhere does not exist"),
    "a folder that is not a run": (("bare",), "bare is not a run"),
    "a run without a step": (("stepless",), "stepless has no steps, so there is nothing to draw"),
    "a folder for a file": (("a", "--out", "bare"), "bare is a folder"),
    "a folder that is missing": (("a", "--out", "missing/x.html"), "there is no folder missing"),
    "too many runs": (("a",) * 9, "a report shows at most 8 runs; got 9"),
    "no ladder": (("a", "--ladder", "bare"), "bare holds no ladder.json"),
    "a name no disk takes": (("a", "--out", "x" * 300), "cannot be written"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_told_and_nothing_is_written(
    what: str, surefoot: Command, tmp_path: Path
) -> None:
    past.write_finished(Path("a"))
    past.write(Path("stepless"), [past.started(), past.ended(0, "failed")])
    Path("bare").mkdir()
    before = sorted(tmp_path.rglob("*"))
    words, told = BAD[what]
    answer = surefoot("report", *words)
    assert (answer.code, answer.out) == (2, "")
    assert told in answer.err
    assert "hint: " in answer.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_page_is_drawn_without_torch(tmp_path: Path) -> None:
    past.write_finished(tmp_path / "a")
    code = (
        "import sys; sys.argv = ['surefoot', 'report', 'a']\nfrom surefoot.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: "
        "sys.exit(end.code or bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False
        ).returncode
        == 0
    )
