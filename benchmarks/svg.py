"""Pictures as SVG text: a few shapes, and line charts on a logarithmic x axis.

No plotting library: what these pictures need is short to write, comes out the same byte for byte on every machine,
and can say its colours twice, for light pages and for dark ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import log2

SERIES = ("#3b82c4", "#d9822b", "#3a9d5d", "#b05fc4", "#c8504b", "#8a8a3c")
"""Colours that can be told apart on white and on black."""

# What a light page needs stands in attributes too, for viewers that know no style sheets.
_STYLE = """<style>
@media (prefers-color-scheme: dark) {
  text { fill: #ccc } .line { stroke: #777 } .grid { stroke: #333 } .page { fill: #111 }
}
</style>"""
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#333"'
_LOOKS = {
    "line": 'class="line" stroke="#999" fill="none"',
    "grid": 'class="grid" stroke="#ddd" fill="none"',
}


@dataclass(eq=False, slots=True)
class Picture:
    """Shapes in the order in which they are drawn, on a page of a given size in pixels."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "start", colour: str = "") -> None:
        """Write words from, around or up to a point on their base line (anchor: start, middle, end)."""
        look = {"": "", "small": ' font-size="10"', "strong": ' font-weight="600"'}[kind]
        style = f' style="fill:{colour}"' if colour else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}{style}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, kind: str = "line") -> None:
        self.shapes.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" {_LOOKS[kind]}/>')

    def rectangle(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none", opacity: float = 1, dash: str = ""
    ) -> None:
        """Draw a box; an unfilled one has an outline, which may be dashed ("3 2": three pixels on, two off)."""
        look = f'fill="{fill}" fill-opacity="{opacity:g}"' if fill != "none" else _LOOKS["line"]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {look}{dashes}/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Join points by straight lines and mark each."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.shapes.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        self.shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]

    def render(self) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>'
        page = f'<rect width="{self.width:g}" height="{self.height:g}" class="page" fill="#fff"/>'
        return "\n".join([head, _STYLE, page, *self.shapes, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over x values that double from tick to tick, in a box on a picture."""

    title: str
    x_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    y_max: float
    y_step: float
    colours: Mapping[str, str] = field(default_factory=dict)
    """Of series that have one of their own; the others take ``SERIES`` in turn."""

    def draw(self, picture: Picture, left: float, top: float, width: float, height: float) -> None:
        """Draw axes, grid, curves and a legend below."""
        ticks = sorted({x for points in self.series.values() for x, _ in points})
        lowest, span = log2(ticks[0]), log2(ticks[-1]) - log2(ticks[0])
        bottom = top + height
        picture.text(left, top - 12, self.title, kind="strong")
        for number in range(round(self.y_max / self.y_step) + 1):
            value = number * self.y_step
            y = bottom - height * value / self.y_max
            picture.line(left, y, left + width, y, kind="line" if number == 0 else "grid")
            picture.text(left - 6, y + 4, f"{value:g}", kind="small", anchor="end")
        for x in ticks:
            at = left + width * (log2(x) - lowest) / span
            picture.text(at, bottom + 15, f"{x:g}", kind="small", anchor="middle")
        picture.text(left + width / 2, bottom + 30, self.x_label, kind="small", anchor="middle")
        for number, (name, points) in enumerate(self.series.items()):
            colour = self.colours.get(name, SERIES[number % len(SERIES)])
            placed = [
                (left + width * (log2(x) - lowest) / span, bottom - height * min(y / self.y_max, 1)) for x, y in points
            ]
            picture.curve(placed, colour)
            picture.text(left, bottom + 48 + 15 * number, name, kind="small", colour=colour)
