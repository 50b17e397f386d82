"""The chart of `moetool compare`: what is lost, by size."""

from pathlib import Path

from moetool.compare.told import Compared, ComparedModel
from moetool.measure.plots import panels


def plot_compared(result: Compared, path: Path) -> None:
    """Excess loss with its standard error, and KL divergence, by the bytes of the weight files; a line per method."""
    lines: dict[str, list[ComparedModel]] = {}
    for row in result.rows:
        if row.error is None:
            lines.setdefault(row.name, []).append(row)
    with panels(path, (11, 4.5), columns=2) as (axes,):
        for axis, measure, title in zip(
            axes, ("excess", "kl"), ("loss above the original's", "KL from the original"), strict=True
        ):
            least = 1.0
            for name, rows in lines.items():
                rows = sorted(rows, key=lambda row: row.bytes or 0)
                sizes = [(row.bytes or 0) / 1e6 for row in rows]
                heights: list[float] = [vars(row)[measure] for row in rows]
                errors = [row.excess_error or 0.0 for row in rows] if measure == "excess" else None
                axis.errorbar(sizes, heights, errors, marker="o", markersize=4, capsize=2, label=name)
                least = min(least, *heights)
            if lines and least > 0:
                axis.set_yscale("log")
            axis.set(title=f"{title}, nats per token", xlabel="weight files, MB")
            axis.grid(visible=True, linewidth=0.3)
        if lines:
            axes[0].legend()
