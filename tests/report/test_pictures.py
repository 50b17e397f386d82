"""Charts: the same bytes for the same numbers, safe to stand in a page, readable without being seen."""

import re
import xml.etree.ElementTree as xml

import pytest

from moetool.report.charts import Bars, Chart, Heat, Lines
from moetool.report.pictures import INK, draw, is_there

pytestmark = pytest.mark.skipif(not is_there(), reason="matplotlib is not installed")
HOSTILE = '"><script>$\\frac$ & </svg>'
CHARTS: list[Chart] = [
    Bars(title=HOSTILE, labels=[HOSTILE, "b"], series={HOSTILE: [1, None]}, label_axis=HOSTILE, axis="x"),
    Bars(title="lying", labels=["a", "b"], series={"x": [1, 2], "y": [2, 1]}, label_axis="l", axis="MB", lying=True),
    Bars(title="log", labels=["a", "b"], series={"x": [1e-9, 2]}, label_axis="l", axis="cost", log=True),
    Lines(title=HOSTILE, at=[1, 2, 3], series={HOSTILE: [1, None, 3], "b": [3, 2, 1]}, at_axis="step", axis=HOSTILE),
    Heat(
        title=HOSTILE, values=[[0.5, None], [1, 0]], rows=["0", HOSTILE], columns=["0", "1"],
        row_axis="layer", column_axis="expert", axis="share",
    ),
    Heat(
        title="many", values=[[row / 64] * 64 for row in range(64)], rows=[str(row) for row in range(64)],
        columns=[str(row) for row in range(64)], row_axis="layer", column_axis="expert", axis="share", least=0,
    ),
    Lines(title="none", at=[1, 2], series={"a": [None, None], "b": [None, 1]}, at_axis="step", axis="loss", log=True),
    Heat(title="none", values=[[None]], rows=["0"], columns=["0"], row_axis="r", column_axis="c", axis="x"),
]  # fmt: skip


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: f"{type(chart).__name__}-{chart.title[:5]}")
def test_a_chart_is_one_sound_element(chart: Chart) -> None:
    drawn = draw(chart, "one")
    root = xml.fromstring(drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    title, words = root[0], root[1]
    assert (title.text, words.text) == (chart.title, chart.words)
    assert root.attrib["aria-labelledby"] == f"{title.attrib['id']} {words.attrib['id']}"
    assert all(each.attrib["id"].startswith("one-") for each in root.iter() if "id" in each.attrib)
    assert INK not in drawn
    assert drawn == draw(chart, "one")
    assert "http" not in drawn
    assert "mathdefault" not in drawn


def test_words_have_the_ranges() -> None:
    bars = Bars(title="t", labels=["0", "1"], series={"up": [1, 3], "down": [2, None]}, label_axis="layer", axis="bits")
    assert bars.words == "bits by layer. up: 1 to 3; down: 2."


def test_what_a_user_has_set_of_matplotlib_changes_nothing() -> None:
    import matplotlib as mpl

    before = draw(CHARTS[0], "one")
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert draw(CHARTS[0], "one") == before
        assert mpl.rcParams["font.size"] == 30


def test_no_two_numbers_of_an_axis_are_the_same() -> None:
    """However little values vary; steps are whole numbers."""
    lines = Lines(
        title="t", at=[5, 10, 15, 20], series={"a": [1.0189, 1.0202, 1.0173, 1.0196]}, at_axis="step", axis="l"
    )
    words = re.findall(r"<text[^>]*>([^<]*)</text>", draw(lines, "one"))
    numbers = [word for word in words if re.fullmatch(r"[\d.]+", word)]
    assert len(set(numbers)) == len(numbers) > 6
    assert all("." not in number for number in numbers if float(number) > 2)
