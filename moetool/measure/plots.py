"""Pictures, by matplotlib (`pip install moetool[plots]`)."""

import os
from pathlib import Path
from typing import Any

from moetool.errors import UsageError

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


def plot_routing(result: dict[str, Any], path: Path) -> None:
    """What `moetool routing` found: shares per expert (mean over the layers), windows by their choices (two principal
    components), and for several texts their dendrogram."""
    import matplotlib as mpl
    from scipy.cluster.hierarchy import dendrogram

    mpl.use("Agg")
    from matplotlib import pyplot

    texts = result["data"]
    several = "linkage" in result
    figure, axes = pyplot.subplots(1, 3 if several else 2, figsize=(15 if several else 10, 4.5), layout="constrained")
    for number, text in enumerate(texts):
        means = [sum(column) / len(column) for column in zip(*text["shares"], strict=True)]
        width = 0.8 / len(texts)
        places = [expert + number * width for expert in range(len(means))]
        axes[0].bar(places, means, width, label=Path(text["name"]).name)
        axes[1].scatter(*zip(*text["components"], strict=True), s=14, label=Path(text["name"]).name)
    axes[0].axhline(1 / len(texts[0]["shares"][0]), color="grey", linewidth=0.8, linestyle=":")
    axes[0].set(title="Share of each expert, mean over the layers", xlabel="expert", ylabel="share")
    axes[1].set(title="Windows by their choices", xlabel="first principal component", ylabel="second")
    axes[1].legend()
    if several:
        names = [Path(text["name"]).name for text in texts]
        dendrogram(result["linkage"], labels=names, ax=axes[2], orientation="right")
        axes[2].set(title="Texts by their choices", xlabel="distance")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
