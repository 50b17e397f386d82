"""Draws docs/size-and-loss.svg from committed results: what each method of compression loses at which size.

python scripts/docs/chart.py
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "size-and-loss.svg"
RESULTS = ROOT / "scripts" / "benchmarks" / "results" / "size_and_loss.md"

# Label → the name of its rows there, up to a comma and a space.
SERIES = {
    "mean base + plain SVD": "mean base",
    "D²-MoE as published": "published: Fisher-weighted base",
    "moetool --method d2moe": "`d2moe`",
    "d2moe --factor-bits 8": "`d2moe --factor-bits 8`",
    "AutoRound, 4 to 2 bits": "AutoRound",
    "moetool --method hybrid": "`hybrid`",
    "hybrid --trellis": "`hybrid --trellis`",
    "hybrid --trellis --refine 120": "`hybrid --trellis --refine 120`",
    "hybrid --trellis --include attention,embeddings": "`hybrid --trellis --include attention,embeddings`",
}
MARKS = {"mean base + plain SVD": "s:", "D²-MoE as published": "D--", "AutoRound, 4 to 2 bits": "^--"}


def points(label: str) -> list[tuple[float, float]]:
    """Bytes that are left, in percent, and the divergence from the original, in nats."""
    found = []
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].partition(", ")[0] == SERIES[label]:
            found.append((100 - float(cells[1].rstrip("%")), float(cells[3]) / 1000))
    return sorted(found, reverse=True)


def draw(file: Path) -> None:
    """The picture, the same bytes every time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "moetool", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    for label in SERIES:
        axes.plot(*zip(*points(label), strict=True), MARKS.get(label, "o-"), label=label, linewidth=1.6, markersize=5)
    axes.set(yscale="log", xlabel="size of the weight files, of the original's", ylabel="KL divergence, nats per token")
    axes.xaxis.set_major_formatter(PercentFormatter())
    axes.invert_xaxis()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside upper center")
    figure.patch.set_facecolor("white")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(FILE)
