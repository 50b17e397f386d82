"""Charts as SVG inside a page, by matplotlib: transparent, text as text, the same bytes for the same numbers."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from moetool.report.charts import Bars, Chart, Heat, Lines, Values, elided

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import Formatter

WIDTH = 5.0  # inches of 72 units: as wide as a phone, so that 11 units of text can be read there
INK = "#010203"  # what is drawn in it takes the colour of the page's text
COLORS = ("#3d85c6", "#d07a22", "#3a9a68", "#a072c8", "#d0605e", "#8a8f98")  # seen on white and on black
_MAP, _CELLS, _WORDY = "viridis", 2048, 9  # cells that are drawn one by one; experts whose numbers fit in theirs
_SETTINGS: dict[Any, object] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "moetool",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def is_there() -> bool:
    """Whether matplotlib can be imported, without which the page has no charts."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return False
    return True


def draw(chart: Chart, name: str) -> str:
    """A chart as an `svg` element whose ids all begin with `name`, which no other of the page may have."""
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, _height(chart)), layout="constrained")
        axes = figure.subplots()
        if isinstance(chart, Heat):
            _heat(axes, chart)
        elif isinstance(chart, Lines):
            _lines(axes, chart)
        else:
            _bars(axes, chart)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), chart, name)


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's own defaults with ours over them, whatever the user has set."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def _height(chart: Chart) -> float:
    if isinstance(chart, Heat):
        return min(7.0, max(2.4, 1.0 + 0.28 * len(chart.rows)))
    if isinstance(chart, Bars) and chart.lying:
        return 1.0 + 0.3 * len(chart.labels) * (0.5 + 0.5 * max(1, len(chart.series)))
    return 3.2


def _bars(axes: "Axes", chart: Bars) -> None:
    width = 0.8 / max(1, len(chart.series))
    for number, (name, values) in enumerate(chart.series.items()):
        places = [group + (number - (len(chart.series) - 1) / 2) * width for group in range(len(chart.labels))]
        heights, color = _numbers(values), COLORS[number % len(COLORS)]
        (axes.barh if chart.lying else axes.bar)(places, heights, width, label=elided(name), color=color)
    ticks, shown = _ticks(chart.labels)
    if chart.lying:
        axes.set_yticks(ticks, shown)
        axes.invert_yaxis()
        axes.set_xlabel(chart.axis)
        axes.xaxis.set_major_formatter(_told_apart())
    else:
        axes.set_xticks(ticks, shown)
        axes.set(xlabel=chart.label_axis, ylabel=chart.axis)
        _values(axes, chart)
    axes.grid(axis="x" if chart.lying else "y", color=INK, alpha=0.15)
    axes.set_axisbelow(True)
    _legend(axes, len(chart.series))


def _lines(axes: "Axes", chart: Lines) -> None:
    for number, (name, values) in enumerate(chart.series.items()):
        marker = "o" if len(chart.at) < 25 else ""
        color = COLORS[number % len(COLORS)]
        there = [(at, value) for at, value in zip(chart.at, values, strict=True) if value is not None]
        axes.plot(
            [at for at, _ in there],
            [value for _, value in there],
            marker=marker,
            markersize=3.5,
            label=elided(name),
            color=color,
        )
    axes.set(xlabel=chart.at_axis, ylabel=chart.axis)
    if all(float(at).is_integer() for at in chart.at):
        axes.locator_params(axis="x", integer=True)
    _values(axes, chart)
    axes.grid(color=INK, alpha=0.15)
    _legend(axes, len(chart.series))


def _heat(axes: "Axes", chart: Heat) -> None:
    values = [_numbers(row) for row in chart.values]
    there = [value for row in values for value in row if not math.isnan(value)]
    least = chart.least if chart.least is not None else min(there, default=0.0)
    most = max(chart.most if chart.most is not None else max(there, default=1.0), least + 1e-9)
    drawn: ScalarMappable
    if len(chart.rows) * len(chart.columns) > _CELLS:
        drawn = axes.imshow(values, cmap=_MAP, vmin=least, vmax=most, aspect="auto", interpolation="none")
    else:
        edges = [[step - 0.5 for step in range(len(names) + 1)] for names in (chart.columns, chart.rows)]
        drawn = axes.pcolormesh(*edges, values, cmap=_MAP, vmin=least, vmax=most)
        axes.invert_yaxis()
    axes.set_xticks(*_ticks(chart.columns))
    axes.set_yticks(*_ticks(chart.rows))
    axes.set(xlabel=chart.column_axis, ylabel=chart.row_axis)
    assert axes.figure is not None
    scale = axes.figure.colorbar(drawn, ax=axes, label=chart.axis, format=_tick)
    scale.outline.set_visible(False)
    if len(chart.columns) <= _WORDY and len(chart.rows) <= 2 * _WORDY:
        for row, numbers in enumerate(values):
            for column, value in enumerate(numbers):
                if not math.isnan(value):
                    dark = (value - least) / (most - least) < 0.6
                    color = "#ffffff" if dark else "#000000"
                    axes.text(column, row, _short(value), ha="center", va="center", color=color, fontsize=10)


def _values(axes: "Axes", chart: Bars | Lines) -> None:
    """Draw the vertical axis of the values."""
    if chart.log and _is_wide(chart.series):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter(_told_apart())


def _is_wide(series: Mapping[str, Values]) -> bool:
    """Whether numbers are of several powers of ten; of fewer a logarithmic axis has hardly a number to show."""
    there = [value for values in series.values() for value in values if value]
    return bool(there) and max(there) > 20 * min(there)


def _tick(value: float, _: float) -> str:
    """Of an axis: the whole number, no power of ten apart from it."""
    return f"{value:.4g}"


def _told_apart() -> "Formatter":
    """Numbers of an axis as `_tick` writes them, with so many more digits that no two are the same."""
    from matplotlib.ticker import FuncFormatter

    class Digits(FuncFormatter):
        def format_ticks(self, values: Iterable[float]) -> list[str]:
            for digits in range(4, 12):
                labels = [f"{value:.{digits}g}" for value in values]
                if len(set(labels)) == len(labels):
                    break
            return labels

    return Digits(_tick)


def _short(value: float) -> str:
    """Two digits after the point, without the zero before it."""
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2g}"


def _numbers(values: Values) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _ticks(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Places and names of at most about sixteen labels."""
    places = list(range(0, len(labels), max(1, math.ceil(len(labels) / 16))))
    return places, [elided(labels[place]) for place in places]


def _legend(axes: "Axes", series: int) -> None:
    """Draw the legend above the axes."""
    if series > 1:
        columns = 2 if any(len(text) > 12 for text in axes.get_legend_handles_labels()[1]) else 3
        place = {"bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(loc="lower left", ncols=columns, fontsize=10, columnspacing=1.2, **place)


def _inline(svg: str, chart: Chart, name: str) -> str:
    """The element alone, with a title and a description, ids of its own and the colour of the text around it."""
    body = svg[svg.index("<svg") :].replace(INK, "currentColor").strip()
    opening, _, inside = body.partition(">")
    inside = re.sub(r"<metadata>.*?</metadata>\s*", "", inside, flags=re.DOTALL)
    inside = re.sub(r'<style type="text/css">.*?</style>\s*', "", inside, flags=re.DOTALL)
    inside = re.sub(r"<defs>\s*</defs>\s*", "", inside)
    inside = re.sub(r'(<g|<text)( [^>]*?)? id="[^"]*"', r"\1", inside)  # nothing refers to these
    inside = re.sub(r' transform="rotate\(-0 [^"]*"', "", inside)
    inside = re.sub(r"\n *", "\n", inside)
    inside = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', inside)
    inside = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", inside)
    inside = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', inside).replace("xlink:href=", "href=")
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    return (
        f'<svg {box[0]} role="img" aria-labelledby="{name}-title {name}-words">'
        f'<title id="{name}-title">{escape(chart.title)}</title><desc id="{name}-words">{escape(chart.words)}</desc>'
        f"{inside}"
    )
