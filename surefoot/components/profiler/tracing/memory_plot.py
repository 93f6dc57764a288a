"""A memory timeline as one SVG file: the categories stacked, without external resources."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.components.profiler.tracing.memory import CATEGORIES, Timeline
from surefoot.core.units import format_bytes, format_seconds

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1200, 420, 84, 64, 34
COLOURS = ("#4878a8", "#7fa65a", "#c9a227", "#c8553d", "#8e7cc3")
NUM_LINES = 4

_STYLE = """svg{background:#fff;color:#1a1a1a}
text{font:12px ui-monospace,monospace;fill:currentColor}.t{font-size:14px}
line{stroke:currentColor;stroke-opacity:.2}
@media (prefers-color-scheme:dark){svg{background:#16181d;color:#e6e6e6}}"""


def draw_memory(found: Timeline) -> str:
    """Return the plot of the timeline, as the text of an SVG file."""
    peak_s, parts = found.peak
    peak = max(1, sum(parts.values()))
    last_s = max(found.times_s[-1], 1e-9)
    wide, high = WIDTH - LEFT - 10, HEIGHT - TOP - BOTTOM

    def at(time_s: float, num_bytes: float) -> str:
        return f"{LEFT + wide * time_s / last_s:.1f},{TOP + high * (1 - num_bytes / peak):.1f}"

    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" '
            'preserveAspectRatio="xMidYMin"'
        ),
        ' role="img" aria-label="memory by category">',
        f"<style>{_STYLE}</style>",
        (
            '<text class="t" x="8" y="20">memory by category: '
            f"peak {format_bytes(peak)} after {format_seconds(peak_s)}</text>"
        ),
    ]
    below = [0] * len(found.times_s)
    for number, name in enumerate(CATEGORIES):
        above = [low + value for low, value in zip(below, found.categories[name], strict=True)]
        path = _steps(found.times_s, above, last_s, at) + list(
            reversed(_steps(found.times_s, below, last_s, at))
        )
        told = f"{name}: {format_bytes(parts[name])} at the peak"
        lines.append(
            f'<polygon points="{" ".join(path)}" '
            f'fill="{COLOURS[number]}"><title>{told}</title></polygon>'
        )
        lines.append(
            f'<rect x="{8 + 238 * number}" y="34" width="11" height="11" fill="{COLOURS[number]}"/>'
        )
        lines.append(
            f'<text x="{24 + 238 * number}" y="44">{name} {format_bytes(parts[name])}</text>'
        )
        below = above
    for number in range(NUM_LINES + 1):
        y = TOP + high * number / NUM_LINES
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        lines.append(
            f'<text x="{LEFT - 6}" y="{y + 4}" '
            f'text-anchor="end">{format_bytes(peak * (1 - number / NUM_LINES))}</text>'
        )
    lines.append(f'<text x="{LEFT}" y="{HEIGHT - 12}">0 s</text>')
    lines.append(
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 12}" '
        f'text-anchor="end">{format_seconds(last_s)}</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def _steps(
    times_s: list[float], values: list[int], last_s: float, at: Callable[[float, float], str]
) -> list[str]:
    """Return the points of a step function: each value holds until the next time."""
    ends = [*times_s[1:], last_s]
    return [
        at(time_s, value)
        for first, last, value in zip(times_s, ends, values, strict=True)
        for time_s in (first, last)
    ]
