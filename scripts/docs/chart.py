"""Draws docs/size-and-loss.svg from committed results: what each method of compression loses at which size.

python scripts/docs/chart.py
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "size-and-loss.svg"
RESULTS = ROOT / "scripts" / "benchmarks" / "results"

# Label → (file, the rows' names there). The first three were measured on the whole test text, the others on a part.
SERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mean base + plain SVD": ("quality.md", ("mean base + plain SVD, uniform",)),
    "D²-MoE as published": ("quality.md", ("Fisher base + truncation-aware SVD, uniform",)),
    "moetool --method d2moe": ("quality.md", ("moetool's default",)),
    "every expert rounded to 4 or 3 bits": ("ders.md", ("plain 4 bits", "plain 3 bits")),
    "moetool --method hybrid": ("ders.md", ("hybrid",)),
}
MARKS = {"mean base + plain SVD": "s:", "D²-MoE as published": "D--", "every expert rounded to 4 or 3 bits": "^--"}


def points(label: str) -> list[tuple[float, float]]:
    """Bytes that are left, in percent, and the loss in excess of the original's, in nats."""
    file, names = SERIES[label]
    found = []
    for line in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for position, name in enumerate(cells[:2]):
            if name in names:
                saved, _, excess = cells[position + 1 : position + 4]
                found.append((100 - float(saved.rstrip("%")), float(excess)))
    return found


def draw(file: Path) -> None:
    """The picture, the same bytes every time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "moetool", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, axes = pyplot.subplots(figsize=(7.2, 4.0), layout="constrained")
    for label in SERIES:
        axes.plot(*zip(*points(label), strict=True), MARKS.get(label, "o-"), label=label, linewidth=1.6, markersize=5)
    axes.set(yscale="log", xlabel="size of the weight files, of the original's", ylabel="loss added, nats per token")
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
