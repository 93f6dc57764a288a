"""Drawings of curves: what stands where, read off the text itself."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from itertools import pairwise

import pytest

from surefoot.cli.plot import NOTHING, Style, overlay, side_by_side, terminal_style
from surefoot.core.schedule.plan import ScheduleSettings, build, preview
from surefoot.core.units import Duration

BRAILLE = range(0x2800, 0x2900)
STEPS = range(1000)
EPOCHS = [(step + 1) / 10 for step in STEPS]


def curve(**table: object) -> list[float]:
    made = build(
        ScheduleSettings(**table),
        len(STEPS),
        lambda text: Duration.parse(text).to_steps(10, 32, None),
    )  # type: ignore[arg-type]
    return preview(made, STEPS, check_every=10)


FOUR = {
    "step": curve(name="step", every="30 epochs"),
    "exponential": curve(name="exponential"),
    "cosine": curve(),
    "plateau": curve(name="plateau"),
}


def heights(drawing: str) -> list[int]:
    """For each column of the first panel the dot row, from the top, of its topmost dot."""
    rows = [
        line.split("┤" if "┤" in line else "│", 1)[1]
        for line in drawing.splitlines()
        if "┤" in line or "│" in line
    ]
    tops = []
    for column in range(max(map(len, rows))):
        cells = [
            (row, ord(line[column]) - 0x2800)
            for row, line in enumerate(rows)
            if column < len(line) and ord(line[column]) in BRAILLE
        ]
        row, dots = cells[0]
        within = next(index for index, mask in enumerate((0x09, 0x12, 0x24, 0xC0)) if dots & mask)
        tops.append(row * 4 + within)
    return tops


def test_a_curve_stands_where_its_values_are() -> None:
    drawing = overlay(
        range(101), {"line": [step / 100 for step in range(101)]}, Style(width=54, height=10)
    )
    tops = heights(drawing)
    assert len(tops) == 54 - len("0.5 │")
    for column, top in enumerate(tops):
        assert top == pytest.approx(39 * (1 - (2 * column + 1) / (2 * len(tops) - 1)), abs=1.0)


def test_points_far_apart_are_joined() -> None:
    assert heights(overlay([0, 1], {"line": [1.0, 0.0]}, Style(width=40, height=8)))[-1] == 31
    assert len(
        heights(overlay([0, 1], {"line": [1.0, 0.0]}, Style(width=40, height=8)))
    ) == 40 - len("0.5 │")


def test_numbers_of_an_axis_never_run_into_each_other() -> None:
    for width in range(12, 60):
        numbers = (
            overlay([100_000, 200_000], {"x": [0.0, 1.0]}, Style(width=width, height=4))
            .splitlines()[-1]
            .split()
        )
        assert all(len(number) == 6 and int(number) % 1000 == 0 for number in numbers), width


def test_a_log_axis_makes_an_exponential_a_straight_line() -> None:
    tops = heights(
        overlay(
            range(101),
            {"decay": [0.95**step for step in range(101)]},
            Style(width=60, height=12, log=True),
        )
    )
    falls = {after - before for before, after in pairwise(tops)}
    assert falls <= {0, 1}
    linear = heights(
        overlay(
            range(101), {"decay": [0.95**step for step in range(101)]}, Style(width=60, height=12)
        )
    )
    assert linear[len(linear) // 2] > 0.8 * linear[-1]


def test_a_log_axis_is_cut_where_a_curve_nears_zero_and_says_so() -> None:
    drawing = overlay(EPOCHS, {"cosine": FOUR["cosine"]}, Style(log=True))
    labels = [line.split("┤")[0].strip() for line in drawing.splitlines() if "┤" in line]
    assert labels == ["1", "0.1", "0.01", "0.001", "0.0001"]
    assert "below 0.0001 the axis is cut" in drawing
    assert "cut" not in overlay(EPOCHS, {"step": FOUR["step"]}, Style(log=True))


def test_the_axes_have_round_numbers_where_they_belong() -> None:
    drawing = overlay(
        [0, 500, 1000], {"line": [0.0, 0.5, 1.0]}, Style(width=60, height=13, x_title="step")
    ).splitlines()
    labels = {row: line.split("┤")[0].strip() for row, line in enumerate(drawing) if "┤" in line}
    assert labels == {0: "1", 3: "0.75", 6: "0.5", 9: "0.25", 12: "0"}
    ticks, numbers = drawing[13], drawing[14]
    columns = len(ticks) - ticks.index("└") - 1
    stand = [
        column - ticks.index("└") - 1 for column, character in enumerate(ticks) if character == "┬"
    ]
    assert stand == [round(share * (columns - 1)) for share in (0, 0.5, 1)]
    assert numbers.split() == ["0", "500", "1000"]
    assert ticks.index("┬", 20) == numbers.index("500") + 1
    assert drawing[15].strip() == "step"


def test_every_curve_of_an_overlay_carries_the_letter_that_the_legend_explains() -> None:
    drawing = overlay(EPOCHS, FOUR, Style(log=True, x_title="epoch"))
    assert "a step   b exponential   c cosine   d plateau" in drawing
    plot = "".join(line.split("┤")[-1].split("│")[-1] for line in drawing.splitlines()[:16])
    assert all(letter in plot for letter in "abcd")
    assert "\x1b" not in drawing  # no color


def test_side_by_side_gives_each_curve_a_panel_under_its_name() -> None:
    for width, panels in (
        (120, [["step", "exponential", "cosine", "plateau"]]),
        (60, [["step", "exponential"], ["cosine", "plateau"]]),
    ):
        drawing = side_by_side(EPOCHS, FOUR, Style(width=width, height=8, log=True))
        assert [
            line.split() for line in drawing.splitlines() if "step" in line or "cosine" in line
        ] == panels


@pytest.mark.parametrize("width", [20, 43, 80, 120])
@pytest.mark.parametrize("draw", [overlay, side_by_side])
def test_a_drawing_keeps_to_its_width_and_height(draw: object, width: int) -> None:
    drawing = draw(EPOCHS, {"only": FOUR["step"]}, Style(width=width, height=7)).splitlines()  # type: ignore[operator]
    assert max(map(len, drawing)) <= width
    assert len(drawing) == 7 + 2 + (draw is side_by_side)
    assert all(
        len(line) <= width
        for line in side_by_side(EPOCHS, FOUR, Style(width=width, height=7)).splitlines()
    )


def test_without_braille_letters_draw_and_coinciding_curves_take_turns() -> None:
    same = {"one": [1.0, 1.0, 1.0], "two": [1.0, 1.0, 1.0], "down": [1.0, 0.5, 0.0]}
    drawing = overlay([0, 1, 2], same, Style(width=30, height=5, braille=False))
    assert drawing.isascii()
    top = drawing.splitlines()[0]
    assert {"a", "b"} <= set(top)
    assert (
        overlay(
            [0, 1, 2], {"one": [1.0, 0.5, 0.0]}, Style(width=30, height=5, braille=False)
        ).count("*")
        >= 3
    )


def test_gaps_and_what_is_not_finite_are_left_out_and_told() -> None:
    drawing = overlay(
        [0, 1, 2, 3, 4], {"loss": [1.0, 1.0, None, 0.0, math.nan]}, Style(width=40, height=6)
    )
    assert "values that are not finite are left out" in drawing
    drawn = [line.split("┤")[-1].split("│")[-1] for line in drawing.splitlines()[:6]]
    # nothing joins what stands on the two sides of a gap
    assert all(not row.strip() for row in drawn[1:5])
    for strange in (math.nan, math.inf, -math.inf):
        rows = overlay(
            [0, 1, 2, 3], {"loss": [1.0, strange, 1.0, 0.5]}, Style(width=40, height=6)
        ).splitlines()
        assert not rows[5].split("┤")[-1][:20].strip()


@pytest.mark.parametrize("values", [[], [None, None], [math.nan, math.inf]])
def test_nothing_to_draw_is_said(values: list[float | None]) -> None:
    for draw in (overlay, side_by_side):
        assert draw(list(range(len(values))), {"x": values}, Style()) == NOTHING
        assert draw([], {}, Style()) == NOTHING


@pytest.mark.parametrize(
    "values",
    [[3e-4], [0.0, 0.0], [-1.0, -1.0], [1e-300, 1e300], [-5.0, 5.0], [7, 7, 7], [1.0, 1.0]],
)
@pytest.mark.parametrize("log", [False, True])
def test_odd_values_are_drawn_too(values: list[float], log: bool) -> None:
    drawing = overlay(list(range(len(values))), {"x": values}, Style(width=40, height=8, log=log))
    assert any(ord(character) in BRAILLE for character in drawing)


def test_a_name_cannot_steer_the_terminal() -> None:
    hostile = {"a\x1b[31m": [1.0, 2.0], "b\nc": [2.0, 1.0]}
    for draw in (overlay, side_by_side):
        assert "\x1b" not in draw([0, 1], hostile, Style(height=5))


def test_a_style_suits_what_the_output_can_show() -> None:
    assert terminal_style("utf-8").braille
    assert not terminal_style("ascii").braille
    assert not terminal_style(None).braille
    assert not terminal_style("no such encoding").braille
    assert 20 <= terminal_style("utf-8").width <= 120
    for encoding in ("utf-8", "ascii", "latin-1"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        stream.write(overlay(EPOCHS, FOUR, terminal_style(encoding, log=True, x_title="epoch")))
        stream.flush()


def test_drawing_imports_neither_torch_nor_numpy_nor_matplotlib() -> None:
    code = (
        "import sys, surefoot.cli.plot; "
        "sys.exit(bool({'torch', 'numpy', 'matplotlib', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
