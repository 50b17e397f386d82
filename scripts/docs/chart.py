"""Draws docs/size-and-loss.svg from committed results: what each method of compression loses at which size, and what on
a kind of text that its calibration did not have.

python scripts/docs/chart.py
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "size-and-loss.svg"
RESULTS = ROOT / "scripts" / "benchmarks" / "results"
KINDS = "## Methods, on one kind and on half of many"  # section of other_text.md
OTHER_KIND = "PERL"  # the column that the right panel shows: a kind that no calibration had

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
# Label of the right panel → what a row was calibrated on, and its mark.
CALIBRATED = {
    "no text": ("no text", "x"),
    "calibrated on one kind": ("text", "^"),
    "half of it of many kinds (default)": ("half", "o"),
}
UNIT = "KL divergence, thousandths of a nat"
MARKS = {"mean base + plain SVD": "s:", "D²-MoE as published": "D--", "AutoRound, 4 to 2 bits": "^--"}


def points(label: str) -> list[tuple[float, float]]:
    """Bytes that are left, in percent, and the divergence from the original, in thousandths of a nat."""
    found = []
    for cells in _rows((RESULTS / "size_and_loss.md").read_text(encoding="utf-8")):
        if cells[0].partition(", ")[0] == SERIES[label]:
            found.append((100 - float(cells[1].rstrip("%")), float(cells[3])))
    return sorted(found, reverse=True)


def other_kind() -> dict[tuple[str, str], float]:
    """By method and what it was calibrated on, the divergence on a kind of text that calibration did not have, in
    thousandths of a nat; methods in the order of the table."""
    section = (RESULTS / "other_text.md").read_text(encoding="utf-8").partition(KINDS)[2].partition("\n## ")[0]
    head, _, *rows = _rows(section)
    column = head.index(OTHER_KIND)
    return {(row[0].replace("`", ""), row[1]): float(row[column].partition(",")[0]) for row in rows}


def _rows(text: str) -> list[list[str]]:
    """The cells of every line of the tables in a page."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def draw(file: Path) -> None:
    """The picture, the same bytes every time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "moetool", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (axes, other) = pyplot.subplots(
        1, 2, figsize=(9.6, 4.6), layout="constrained", width_ratios=(1.5, 1), sharey=True
    )
    for label in SERIES:
        axes.plot(*zip(*points(label), strict=True), MARKS.get(label, "o-"), label=label, linewidth=1.6, markersize=5)
    axes.set(yscale="log", xlabel="size of the weight files, of the original's", ylabel=UNIT)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("on the calibration's kind of text", fontsize=10)
    axes.xaxis.set_major_formatter(PercentFormatter())
    axes.invert_xaxis()
    found = other_kind()
    methods = list(dict.fromkeys(method for method, _ in found))
    for label, (calibrated, mark) in CALIBRATED.items():
        places = [(place, found[own, calibrated]) for place, own in enumerate(methods) if (own, calibrated) in found]
        other.plot(*zip(*places, strict=True), mark, color="black", label=label, markersize=6)
    other.set_xticks(range(len(methods)), methods, rotation=35, ha="right", fontsize=9)
    other.set_title("on Perl documentation, a kind it did not have", fontsize=10)
    other.legend(frameon=False, fontsize=9)
    for each in (axes, other):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=3, loc="outside upper center")
    figure.patch.set_facecolor("white")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(FILE)
