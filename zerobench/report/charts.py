"""Charts as inline SVG, drawn by matplotlib: the same bytes for the same numbers, text as text, colours from the page.

The SVG is parsed and written again element by element, by a list of what may be in it: so it has no script, no link, no
comment and no id of its own, whatever a name in it says. Colours become variables of the page's style, which has them
for light, dark and paper; they differ in lightness too, and so without hue.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from zerobench.report.figures import States, StepTime, Timeline, Traffic
from zerobench.report.text import clean
from zerobench.terms import MODEL_STATES, Category, Collective

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, RULE, C1, C2, C3, C4, SHADE = "#111111", "#dddddd", "#1b4f8a", "#e69f00", "#a9d8f0", "#c0532b", "#eeeeee"
_VARIABLES = {
    INK: "currentColor",
    RULE: "var(--rule)",
    C1: "var(--c1)",
    C2: "var(--c2)",
    C3: "var(--c3)",
    C4: "var(--c4)",
    SHADE: "var(--shade)",
}
STATE_COLOURS = {Category.PARAMETER: C1, Category.GRADIENT: C2, Category.OPTIMIZER: C3}
KIND_COLOURS = {Collective.ALL_REDUCE: C1, Collective.REDUCE_SCATTER: C2, Collective.ALL_GATHER: C3}
_ELEMENTS = frozenset({"svg", "g", "defs", "path", "clipPath", "rect", "use", "text", "tspan"})
_ATTRIBUTES = frozenset(
    {"id", "d", "x", "y", "width", "height", "transform", "style", "clip-path", "viewBox", "fill", "stroke"}
    | {"text-anchor", "preserveAspectRatio", "href"}
)
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "zerobench",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
}


class NoMatplotlib(Exception):
    """The library that draws is not installed; says what to do."""


FRAME = (0.62, 0.32, 0.5, 0.1)
"""Inches left, right, below and above of axes whose labels are numbers of a few digits."""
ALONG = (0.1, 0.2, 0.45, 0.1)
"""The same without the names beside the axis."""
LETTER = 0.08
"""Inches of a letter of a name, and some room: at 9 points a sans-serif's letters are 0.06 to 0.08 wide on average. The
page's own font is not known when a chart is drawn, so measuring in another would be no better."""


def svg(
    draw: Callable[[Axes], None],
    *,
    key: str,
    title: str,
    about: str,
    size: tuple[float, float],
    frame: tuple[float, float, float, float],
) -> str:
    """What `draw` draws, as an element for a page. key: a word for its ids, once a page. about: the text alternative.
    size: inches, which on the page are shares of the width. frame: room around the axes, given since to find out what
    the labels need takes half of a chart's time. Raises NoMatplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(f"charts need matplotlib ({error}): pip install 'zerobench[report]'") from None
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=size)
        (width, height), (left, right, below, above) = size, frame
        figure.subplots_adjust(left / width, below / height, 1 - right / width, 1 - above / height)
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(drawn.getvalue(), key, title, about)


def label(text: str, limit: int = 34) -> str:
    """A stranger's word as one line of a chart."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def beside(names: Iterable[str]) -> tuple[float, float, float, float]:
    """The frame of a chart with these names beside it."""
    left, *others = ALONG
    return (left + LETTER * max(map(len, names), default=0), *others)  # type: ignore[return-value]


def traffic_names(figure: Traffic) -> list[str]:
    """The names beside a chart of traffic, from above."""
    return [label(name, 22) for name in figure.sent]


def time_names(rows: Sequence[StepTime]) -> list[str]:
    """The names beside a chart of step times, from above."""
    return [label(f"{r.case.implementation}, n = {r.case.world_size}", 26) for r in rows]


def draw_states(axes: Axes, figure: States, top: float) -> None:
    """Measured bars beside the formula's pale ones, against n. top: of the scale, which charts share to be compared."""
    ns = list(figure.measured)
    for side, bars in ((-1, figure.measured), (1, figure.formula)):
        base = [0.0] * len(ns)
        for category in MODEL_STATES:
            heights = [bars[n][category] / figure.psi for n in ns]
            colour = STATE_COLOURS[category]
            axes.bar(
                [i + side * 0.2 for i in range(len(ns))],
                heights,
                0.36,
                base,
                color=colour,
                alpha=0.4 if side > 0 else None,
            )
            base = [b + h for b, h in zip(base, heights, strict=True)]
    for i, n in enumerate(ns):
        for side, bars in ((-1, figure.measured), (1, figure.formula)):
            total = sum(bars[n].values()) / figure.psi
            axes.text(i + side * 0.2, total + 0.015 * top, f"{total:.3g}", ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(range(len(ns)), [str(n) for n in ns])
    axes.set_xlim(-0.7, max(len(ns) - 1, 1) + 0.7)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(_whole())
    axes.grid(False, axis="x")
    axes.set_xlabel("ranks n (solid: measured; pale: formula)")
    axes.set_ylabel("bytes a rank / Psi")


def draw_traffic(axes: Axes, figure: Traffic) -> None:
    """A bar an implementation, stacked by kind; what it claims as a tick, 2 Psi as a line."""
    names = list(figure.sent)[::-1]
    kinds = [k for k in Collective if any(k in figure.sent[name] for name in names)]
    base = dict.fromkeys(names, 0.0)
    for kind in kinds:
        widths = [figure.sent[name].get(kind, 0.0) for name in names]
        colour = KIND_COLOURS.get(kind, C4)
        axes.barh(
            range(len(names)),
            widths,
            0.6,
            list(base.values()),
            color=colour,
            edgecolor=INK,
            linewidth=0.4,
            label=kind.value,
        )
        base = {name: base[name] + w for name, w in zip(names, widths, strict=True)}
    axes.axvline(2, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    for i, name in enumerate(names):
        axes.plot([figure.claimed[name]] * 2, [i - 0.4, i + 0.4], color=C4, linewidth=2.2)
    _names(axes, traffic_names(figure)[::-1])
    axes.set_xlim(0, max(2.3, *base.values(), *figure.claimed.values()) * 1.06)
    axes.set_xlabel("elements sent, in Psi (n-1)/n (dashed: 2 Psi)")


def draw_times(axes: Axes, rows: Sequence[StepTime]) -> None:
    """A dot a case at its median, a line over its interval."""
    rising = rows[::-1]
    known = [(i, r.low_s, r.high_s) for i, r in enumerate(rising) if r.low_s is not None and r.high_s is not None]
    spans = [(i, low * 1e3, high * 1e3) for i, low, high in known]
    if spans:
        axes.hlines(*zip(*spans, strict=True), color=C1, linewidth=2.4, capstyle="butt")  # type: ignore[arg-type]
    medians = [r.median_s * 1e3 for r in rising]
    axes.plot(medians, range(len(rows)), marker="o", color=C2, markeredgecolor=INK, markersize=5, linestyle="")
    _names(axes, time_names(rising))
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds a step")


def draw_timeline(axes: Axes, figure: Timeline, top: float) -> None:
    """Live bytes at each place of the step, the bare model's under them, peaks within phases above. top: as above."""
    psi, xs = figure.psi, range(len(figure.points))
    axes.fill_between(xs, [p.live / psi for p in figure.points], color=C3, linewidth=0)
    axes.plot(xs, [p.live / psi for p in figure.points], color=C1, linewidth=1.6, marker="o", markersize=2.6)
    bare = [(i, (p.bare or 0) / psi) for i, p in enumerate(figure.points) if p.bare is not None]
    for phase in ("forward", "backward"):
        mine = [(i, y) for i, y in bare if figure.points[i].phase == phase]
        axes.plot(*zip(*mine, strict=True), color=INK, linewidth=1.2, linestyle=(0, (2, 2))) if mine else None
    for phase, peak in figure.peaks.items():
        inside = [i for i, p in enumerate(figure.points) if p.phase == phase]
        if inside:
            ends = [inside[0], min(inside[-1] + (phase != "step"), len(figure.points) - 1)]
            axes.plot(ends, [peak / psi] * 2, color=C4, linewidth=1.8)
    starts = [i for i in xs if i == 0 or figure.points[i].phase != figure.points[i - 1].phase]
    for i in starts[1:]:
        axes.axvline(i, color=INK, linewidth=0.5)
    axes.set_xticks(starts, [figure.points[i].phase for i in starts], ha="left")
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(_whole())
    axes.grid(False, axis="x")
    axes.set_xlabel("unit boundaries of one step, in order")
    axes.set_ylabel("bytes on the rank / Psi")


def _names(axes: Axes, names: Sequence[str]) -> None:
    """Beside the axis, the i-th at i. As text, since a tick with a label takes several times as long."""
    for i, name in enumerate(names):
        axes.text(-0.02, i, name, ha="right", va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(names) - 0.4)


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 10])


# -- from matplotlib's file to an element of the page ------------------------------------------------------------------


def _inline(source: bytes, key: str, title: str, about: str) -> str:
    root = ElementTree.fromstring(source)  # matplotlib's own output; comments are dropped
    box = root.get("viewBox", "0 0 1 1")
    inner = "".join(_written(child, key) for child in root)
    return (
        f'<svg viewBox="{escape(box)}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(label(title, 200))}</title><desc id="{key}-d">{escape(label(about, 2000))}</desc>'
        f"{inner}</svg>"
    )


def _written(element: Any, key: str) -> str:
    name = element.tag.rpartition("}")[2]
    if name not in _ELEMENTS:
        return ""
    attributes = []
    for full, value in element.attrib.items():
        attribute = full.rpartition("}")[2]
        if attribute not in _ATTRIBUTES or (attribute == "id" and name == "g"):
            continue
        if attribute == "id":
            value = f"{key}-{value}"
        elif attribute == "href":
            if not value.startswith("#"):
                continue
            value = f"#{key}-{value[1:]}"
        elif attribute == "style":
            value = _styled(value)
        elif attribute == "clip-path":
            value = value.replace("url(#", f"url(#{key}-")
        elif attribute in ("d", "transform", "x", "y"):
            value = _shorter(value)
        if value:
            attributes.append(f' {attribute}="{escape(value)}"')
    text = escape(element.text.strip()) if element.text and name in ("text", "tspan") else ""
    return f"<{name}{''.join(attributes)}>{text}{''.join(_written(child, key) for child in element)}</{name}>"


def _styled(style: str) -> str:
    style = re.sub(r"font:\s*([\d.]+px)[^;]*", r"font-size: \1", style)
    style = re.sub(r"font-family:[^;]*;?", "", style)
    for colour, variable in _VARIABLES.items():
        style = style.replace(colour, variable)
    return style.strip()


def _shorter(numbers: str) -> str:
    """Two decimals of a point are enough; half the bytes of a chart are digits."""
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip("."), numbers).replace(
        "\n", " "
    )
