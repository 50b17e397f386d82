"""Charts of measurements, drawn by matplotlib (`pip install moetool[plots]`)."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moetool.checkpoint.files import storage_errors
from moetool.checkpoint.source import local_path
from moetool.errors import UsageError
from moetool.job.checks import output_file
from moetool.measure.inspected import Analysis
from moetool.measure.results import Clustering, RoutingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DrawnT = TypeVar("DrawnT")

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Check that a chart can be written to a path, before anything is measured for it.

    Raises:
        UsageError: matplotlib is missing, the suffix is not known, or there is no such folder.
        ResourceError: nothing can be written there.
    """
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib.") from error
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: a picture's name ends in {', '.join(SUFFIXES)}.")
    output_file(path)


def pictured(plot: Path | None, make: Callable[[], DrawnT], draw: Callable[[DrawnT, Path], None]) -> DrawnT:
    """Return the result of `make`, and draw it into the file `plot` if one is given.

    Raises:
        UsageError, ResourceError: the picture could not be written; raised before `make` is called.
    """
    if plot is None:
        return make()
    plot = local_path(plot)
    check_picture(plot)
    result = make()
    with storage_errors(plot):
        draw(result, plot)
    return result


@contextmanager
def panels(path: Path, size: tuple[float, float], *, columns: int, rows: int = 1) -> Iterator[Any]:
    """The axes `[rows][columns]` of a figure of so many inches, which is written to `path` when they are drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        yield axes
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def plot_routing(result: RoutingResult, path: Path) -> None:
    """Plot the result of `moetool routing`.

    Panels: shares per expert (mean over the layers), windows by their choices (two principal components), and for
    several texts their dendrogram.
    """
    texts, names = result.data, [Path(text.name).name for text in result.data]
    columns = 2 if result.clustering is None else 3
    with panels(path, (5 * columns, 4.5), columns=columns) as (axes,):
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            means = [sum(column) / len(column) for column in zip(*text.shares, strict=True)]
            width = 0.8 / len(texts)
            places = [expert + number * width for expert in range(len(means))]
            axes[0].bar(places, means, width, label=name)
            axes[1].scatter(*zip(*text.components, strict=True), s=14, label=name)
        axes[0].axhline(1 / len(texts[0].shares[0]), color="grey", linewidth=0.8, linestyle=":")
        axes[0].set(title="Share of each expert, mean over the layers", xlabel="expert", ylabel="share")
        axes[1].set(title="Windows by their choices", xlabel="first principal component", ylabel="second")
        axes[1].legend()
        if result.clustering is not None:
            _draw_tree(axes[2], result.clustering, names)


def plot_analysis(result: Analysis, path: Path) -> None:
    """Plot the result of `moetool inspect --analysis`, a row of panels for each role.

    Panels: energy in the largest singular values and CKA of every two experts, both means over the layers; and by layer
    the CKA of two experts, its mean and its range.
    """
    roles = list(result.layers[0].roles)
    with panels(path, (14, 3.6 * len(roles)), columns=3, rows=len(roles)) as grid:
        for axes, role in zip(grid, roles, strict=True):
            own = [layer.roles[role] for layer in result.layers]
            for name in ("experts", "base", "delta"):
                found = [energy for each in own if (energy := getattr(each.energy, name)) is not None]
                if found:
                    axes[0].plot(result.shares, [_mean(column) for column in zip(*found, strict=True)], label=name)
            axes[0].set(title=f"{role}: energy in the largest singular values", xlabel="% of them", ylim=(0, 1.02))
            axes[0].legend()
            experts = range(len(own[0].cka.matrix))
            means = [[_mean([each.cka.matrix[i][j] for each in own]) for j in experts] for i in experts]
            image = axes[1].imshow(means, vmin=0, vmax=1, cmap="viridis")
            axes[1].figure.colorbar(image, ax=axes[1])
            axes[1].set(title=f"{role}: CKA of experts", xlabel="expert", ylabel="expert")
            numbers = [layer.layer for layer in result.layers]
            middle, low, high = (
                [math.nan if (value := getattr(each.cka, name)) is None else value for each in own]
                for name in ("mean", "min", "max")
            )
            axes[2].fill_between(numbers, low, high, alpha=0.25)
            axes[2].plot(numbers, middle, marker="o", markersize=3)
            axes[2].set(title=f"{role}: CKA of two experts by layer", xlabel="layer", ylim=(0, 1.02))
            axes[2].xaxis.get_major_locator().set_params(integer=True)


def _mean(values: Sequence[float | None]) -> float:
    """Mean of the values that are there; NaN if none is."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else math.nan


def _draw_tree(axis: "Axes", clustering: Clustering, names: list[str]) -> None:
    """The dendrogram, its leaves on the left. scipy draws none whose distances are all zero without a warning."""
    from scipy.cluster.hierarchy import dendrogram

    tree = dendrogram(clustering.linkage, labels=names, no_plot=True)
    for distances, places, color in zip(tree["dcoord"], tree["icoord"], tree["color_list"], strict=True):
        axis.plot(distances, places, color=color)
    axis.set_yticks(range(5, 10 * len(names), 10), tree["ivl"])
    largest = max(distance for _, _, distance, _ in clustering.linkage)
    axis.set(
        title="Texts by their choices", xlabel="distance", xlim=(0, 1.05 * largest or 1), ylim=(0, 10 * len(names))
    )
