"""Flame graph of a tree of frames, as one SVG file without external resources.

A click or the Enter key zooms in on a frame. The width of a frame is its share of the window.
Callers are above the functions that they call, which are in the order of their first calls.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

from surefoot.components.profiler.tracing.fold import StackFrame
from surefoot.core.units import format_percent, format_seconds

WIDTH, ROW, TOP, SIDE = 1200, 18, 46, 6
MIN_SHARE = 5e-4  # a frame under 0.6 of 1,200 pixels is not drawn
MAX_DEPTH = 120
CHARACTER = 6.4  # pixels of one at 11 px, monospaced
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE = """
svg{background:#fff;color:#1a1a1a}
text{font:11px ui-monospace,monospace;fill:currentColor}.t{font-size:14px}
.f{cursor:pointer}.f rect{stroke:#fff;stroke-width:.5}.f text{fill:#1a1a1a;pointer-events:none}
.f:hover rect,.f:focus rect{stroke:#000;stroke-width:1.5}
.f:focus{outline:none}.u{opacity:.5}
@media (prefers-color-scheme:dark){svg{background:#16181d;color:#e6e6e6}.f rect{stroke:#16181d}
.f:hover rect,.f:focus rect{stroke:#fff}}
"""
_SCRIPT = f"""
(function(){{
var svg=document.currentScript.ownerSVGElement,all=[].slice.call(svg.querySelectorAll('.f'));
var status=svg.querySelector('.s');
var usual='click a frame to zoom in; '+status.textContent;status.textContent=usual;
function of(g,k){{return +g.getAttribute(k)}}
function zoom(to){{
 var x=of(to,'data-x'),w=of(to,'data-w'),y=of(to,'data-y'),scale={WIDTH - 2 * SIDE}/w;
 all.forEach(function(g){{
  var a=of(g,'data-x'),b=of(g,'data-w'),above=of(g,'data-y')<y&&a<=x&&a+b>=x+w;
  var left=above?0:(a-x)*scale,wide=above?w*scale:b*scale,out=!above&&(a+b<=x||a>=x+w);
  g.style.display=out||wide<.5?'none':'';g.setAttribute('class',above?'f u':'f');
  var r=g.querySelector('rect'),t=g.querySelector('text');
  var n=Math.floor((wide-6)/{CHARACTER}),name=g.getAttribute('data-n');
  r.setAttribute('x',{SIDE}+left);r.setAttribute('width',Math.max(wide,.5));
  t.setAttribute('x',{SIDE}+left+3);
  t.textContent=n<3?'':name.length<=n?name:name.slice(0,n-1)+'\\u2026';
 }});
 status.textContent=to===all[0]?usual
  :to.querySelector('title').textContent.replace(/\\n/g,'   ')+'   (Escape: all of it)';
}}
all.forEach(function(g){{
 g.addEventListener('click',function(){{zoom(g)}});
 g.addEventListener('keydown',function(e){{if(e.key==='Enter')zoom(g)}});
}});
document.addEventListener('keydown',function(e){{if(e.key==='Escape')zoom(all[0])}});
}})();
"""


class FlameBox(NamedTuple):
    """Frame with its position in a flame graph.

    `left_ns` is the distance from the left edge, and `total_ns` the width, both in nanoseconds of
    the window. `row` counts from the top, starting at 0.
    """

    frame: StackFrame
    left_ns: int
    total_ns: int
    row: int


def boxes(root: StackFrame) -> Iterator[FlameBox]:
    """Yield the frames that are wide enough to be visible, each after its caller."""
    totals: dict[int, int] = {}
    _add_up(root, totals)
    least_ns = MIN_SHARE * totals[id(root)]
    waiting = [FlameBox(root, 0, totals[id(root)], 0)]
    while waiting:
        box = waiting.pop()
        yield box
        left_ns, below = box.left_ns, []
        for child in box.frame.children.values():
            if totals[id(child)] >= least_ns and box.row < MAX_DEPTH:
                below.append(FlameBox(child, left_ns, totals[id(child)], box.row + 1))
            left_ns += totals[id(child)]
        waiting.extend(reversed(below))


def _add_up(root: StackFrame, totals: dict[int, int]) -> None:
    """Compute the total time of `root` and of every frame below it, in nanoseconds.

    The times are stored in `totals`, by the `id` of the frame. The function is not recursive,
    because a Python stack may be deeper than the recursion limit.
    """
    order, waiting = [], [root]
    while waiting:
        frame = waiting.pop()
        order.append(frame)
        waiting.extend(frame.children.values())
    for frame in reversed(order):
        totals[id(frame)] = frame.self_ns + sum(
            totals[id(child)] for child in frame.children.values()
        )


def draw(root: StackFrame, title: str) -> str:
    """Return the flame graph of a tree as the text of an SVG file."""
    drawn = list(boxes(root))
    whole_ns = drawn[0].total_ns
    height = TOP + ROW * (1 + max(box.row for box in drawn)) + 8
    label = f"{title}: {format_seconds(whole_ns / 1e9)}"
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
            'preserveAspectRatio="xMidYMin"'
        ),
        f' role="img" aria-label="{_text(label)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="t" x="{SIDE}" y="18">{_text(label)}</text>',
        (
            f'<text class="s" x="{SIDE}" y="36">'
            f"frames under {format_percent(MIN_SHARE)} are not drawn</text>"
        ),
    ]
    parts += [_group(box, whole_ns) for box in drawn]
    return "\n".join([*parts, f"<script><![CDATA[{_SCRIPT}]]></script>", "</svg>", ""])


def _group(box: FlameBox, whole_ns: int) -> str:
    scale = (WIDTH - 2 * SIDE) / whole_ns if whole_ns else 0.0
    x, wide, y = SIDE + box.left_ns * scale, box.total_ns * scale, TOP + ROW * box.row
    name, room = box.frame.name, int((wide - 6) / CHARACTER)
    shown = "" if room < 3 else name if len(name) <= room else name[: room - 1] + "\u2026"
    share = format_percent(box.total_ns / whole_ns if whole_ns else None)
    tooltip = (
        f"{name}\n{format_seconds(box.total_ns / 1e9)}, {share}; "
        f"itself {format_seconds(box.frame.self_ns / 1e9)}"
    )
    return (
        f'<g class="f" tabindex="0" data-x="{box.left_ns}" data-w="{box.total_ns}" '
        f'data-y="{box.row}" data-n="{_text(name)}">'
        f'<title>{_text(tooltip)}</title><rect x="{x:.2f}" y="{y}" width="{max(wide, 0.5):.2f}" '
        f'height="{ROW - 1}" fill="{_color(name)}"/>'
        f'<text x="{x + 3:.2f}" y="{y + 12.5}">{_text(shown)}</text></g>'
    )


def _color(name: str) -> str:
    """Return a color that depends only on the name of a frame.

    It is a warm color for operators, blue for Python functions, and green for modules and ranges.
    """
    spread = zlib.crc32(name.encode("utf-8", "replace"))
    hue = (
        20
        if name.startswith(("aten::", "autograd::")) or "Backward" in name
        else 210
        if ".py(" in name or name[:1] == "<"
        else 110
    )
    return f"hsl({hue + spread % 36},{52 + spread % 20}%,{66 + spread // 64 % 14}%)"


def _text(text: str) -> str:
    """Return `text` for use in XML: markup is escaped, and invalid characters become "?"."""
    return escape(_NOT_XML.sub("?", text), {'"': "&quot;", "'": "&#39;"})
