"""Pictures, by matplotlib (`pip install moetool[plots]`)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from moetool.checkpoint.source import local_path
from moetool.errors import UsageError
from moetool.measure.told import Clustering, RoutingTold

DrawnT = TypeVar("DrawnT")

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Raise `UsageError` unless a picture can be written there."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib.") from error
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: a picture's name ends in {', '.join(SUFFIXES)}.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"--plot {path}: {what}.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"--plot {path}: it may not be written.")


def pictured(plot: Path | None, make: Callable[[], DrawnT], draw: Callable[[DrawnT, Path], None]) -> DrawnT:
    """What `make` gives, drawn into the file `plot` if there is one. Raises `UsageError` before it is made if that
    cannot be."""
    if plot is None:
        return make()
    plot = local_path(plot)
    check_picture(plot)
    result = make()
    draw(result, plot)
    return result


def plot_routing(result: RoutingTold, path: Path) -> None:
    """What `moetool routing` found: shares per expert (mean over the layers), windows by their choices (two principal
    components), and for several texts their dendrogram."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    texts, names = result.data, [Path(text.name).name for text in result.data]
    panels = 2 if result.clustering is None else 3
    figure, axes = pyplot.subplots(1, panels, figsize=(5 * panels, 4.5), layout="constrained")
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_tree(axis: Any, clustering: Clustering, names: list[str]) -> None:
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
