"""Chart of `moetool compare`: loss of quality by size of the models."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from moetool.compare.results import Compared, ComparedModel, kind_of_text
from moetool.measure.plots import panels
from moetool.measure.results import NAT_UNIT, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
# A row of the table → what is shown of it, and the standard error of that, 0 where there is none; both in `NAT_UNIT`.
_Height: TypeAlias = Callable[[ComparedModel], tuple[float, float]]


def plot_compared(result: Compared, path: Path) -> None:
    """Plot the quality lost against the bytes of the weight files, one line per method.

    One text gives a panel of the excess loss with its standard error and one of the KL divergence. Several give a panel
    of the KL divergence on each, on one scale, whose title says whether calibration had text of that kind.
    """
    lines: dict[str, list[ComparedModel]] = {}
    for row in result.rows:
        if row.error is None:
            lines.setdefault(row.name, []).append(row)
    is_several = len(result.texts) > 1
    shown = _text_by_text(result) if is_several else _PANELS
    columns = min(_COLUMNS, len(shown))
    count = -(-len(shown) // columns)
    size = (5.5 * columns, 4.5 * count)
    with panels(path, size, columns=columns, rows=count) as grid:
        axes = [axis for row in grid for axis in row]
        for axis, (title, height) in zip(axes, shown.items(), strict=False):
            if is_several and axis is not axes[0]:
                axis.sharey(axes[0])
            _draw(axis, title, height, lines)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        if lines:
            axes[0].legend()


_PANELS: dict[str, _Height] = {
    "loss above the original's": lambda row: (1000 * (row.excess or 0.0), 1000 * (row.excess_error or 0.0)),
    "KL from the original": lambda row: (1000 * (row.kl or 0.0), 0.0),
}


def _text_by_text(result: Compared) -> dict[str, _Height]:
    """One panel for each text, whose bars are the KL divergence on it."""

    def height(number: int) -> _Height:
        return lambda row: (1000 * lost.kl if (lost := row.texts[number].against) else 0.0, 0.0)

    found = {}
    for number, name in enumerate(short_names([text.name for text in result.texts])):
        kind = kind_of_text(result, number)
        found[f"KL on {name}" + (f" ({kind})" if kind else "")] = height(number)
    return found


def _draw(axis: "Axes", title: str, height: _Height, lines: dict[str, list[ComparedModel]]) -> None:
    """One panel."""
    for name, rows in lines.items():
        rows = sorted(rows, key=lambda row: row.bytes or 0)
        sizes = [(row.bytes or 0) / 1e6 for row in rows]
        heights, errors = zip(*map(height, rows), strict=True)
        axis.errorbar(sizes, heights, errors if any(errors) else None, marker="o", markersize=4, capsize=2, label=name)
    if lines and all(height(row)[0] > 0 for rows in lines.values() for row in rows):
        axis.set_yscale("log")
    axis.set(title=title, ylabel=NAT_UNIT, xlabel="weight files, MB")
    axis.grid(visible=True, linewidth=0.3)
