"""In a real browser a report runs nothing, asks for nothing and overflows nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import past_runs as past
from tests.cli.browser import Browser, browsing, find_browser
from tests.cli.conftest import Command
from tests.cli.past_profile import write_ladder
from tests.cli.test_report import HOSTILE, write_whole


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all of this file's pages; skips, visibly, where none is installed."""
    program = find_browser()
    if program is None:
        pytest.skip("needs a Chromium: apt install chromium, or playwright install chromium")
    with browsing(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


def test_the_browser_sees_what_a_page_does(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<p style='width: 3000px'>x</p><script>window.hostile = 1; console.log(1); "
        "nothing()</script><img src='http://there/x'>"
    )
    browser.open(page)
    assert len(browser.complaints()) >= 2
    assert "http://there/x" in browser.requests()
    assert browser.value("window.hostile") == 1
    assert browser.value("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("kind", ["none", *HOSTILE])
def test_in_a_browser_nothing_runs_leaves_the_file_or_overflows(
    kind: str, browser: Browser, surefoot: Command
) -> None:
    name = HOSTILE.get(kind, "digits")
    first, second = write_whole(Path("a"), name), past.write_finished(Path("b"))
    surefoot("report", first, second, "--ladder", write_ladder(Path("climbed"), name=name))
    page = (first / "compared.html").resolve()
    for width, dark in ((1200, False), (1200, True), (375, False)):
        browser.open(page, width=width, dark=dark)
        assert browser.complaints() == []
        assert {
            each for each in browser.requests() if not each.startswith("data:image/svg+xml;base64,")
        } == {page.as_uri()}
        assert browser.value("window.hostile") is None
        assert browser.value("document.scripts.length") == 0
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        if (kind, width) == ("none", 1200):
            cut_off = (
                "[...document.querySelectorAll('.scroll')].filter(each => "
                "each.scrollWidth > each.clientWidth)"
            )
            assert browser.value(f"{cut_off}.map(each => each.textContent)") == []
    # the policy lets our own style through
    assert browser.value("getComputedStyle(document.querySelector('.line')).fill") == "none"
    browser.open(page, width=794, media="print")  # A4
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.print_pages()[:5] == b"%PDF-"
