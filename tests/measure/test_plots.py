"""Pictures: drawn without a warning, which is an error here, and with what they should show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moetool.job.result import Keyed
from moetool.measure.inspected import Analysis, Energies, LayerAnalysis, RoleAnalysis, Similarity
from moetool.measure.plots import plot_analysis, plot_routing
from moetool.measure.results import Clustering, RoutingResult, TextRouting

pyplot = pytest.importorskip("matplotlib.pyplot")


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, linkage: Sequence[Sequence[float]]) -> Any:
    """The panels of the picture of as many texts as the linkage joins."""
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    texts = [
        TextRouting(name=f"to/{name}.txt", tokens=8, shares=[[0.5, 0.5]], components=[[0.0, 0.0]])
        for name in "abc"[: len(linkage) + 1]
    ]
    clustering = Clustering([], linkage) if linkage else None
    plot_routing(RoutingResult(model="m", begin=None, data=texts, depends_on_batch=False, clustering=clustering), path)
    monkeypatch.undo()
    pyplot.close(figures[0])
    assert path.stat().st_size > 0
    return figures[0].axes


def test_one_text_has_no_tree(monkeypatch, tmp_path):
    assert len(drawn(monkeypatch, tmp_path / "one.svg", [])) == 2


def test_texts_of_the_same_choices(monkeypatch, tmp_path):
    """All of their distances are zero."""
    tree = drawn(monkeypatch, tmp_path / "same.svg", [[0, 1, 0.0, 2]])[2]
    assert [label.get_text() for label in tree.get_yticklabels()] == ["a.txt", "b.txt"]
    assert tree.get_xlim() == (0, 1)
    assert [set(line.get_xdata()) for line in tree.get_lines()] == [{0.0}]


def test_a_tree_joins_at_distances(monkeypatch, tmp_path):
    tree = drawn(monkeypatch, tmp_path / "three.svg", [[0, 2, 0.25, 2], [1, 3, 0.5, 3]])[2]
    assert sorted(label.get_text() for label in tree.get_yticklabels()) == ["a.txt", "b.txt", "c.txt"]
    assert sorted(max(line.get_xdata()) for line in tree.get_lines()) == [0.25, 0.5]
    assert tree.get_xlim() == pytest.approx((0, 0.525))


def test_what_an_analysis_found(monkeypatch, tmp_path):
    def layer(number: int, energy: Sequence[float] | None, cka: Sequence[Sequence[float | None]]) -> LayerAnalysis:
        own = Similarity(cka, cka[0][1], cka[0][1], cka[0][1])
        energies = Energies(energy, energy, None, [0, 1])
        role = RoleAnalysis(base="mean", sensitivity=None, cka=own, cka_v=None, cka_u=None, energy=energies)
        return LayerAnalysis(layer=number, sensitivity=None, token_share=None, roles=Keyed({"down": role}))

    layers = [layer(0, [0.5, 0.9], [[1.0, 0.25], [0.25, 1.0]]), layer(3, None, [[1.0, None], [None, 1.0]])]
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot_analysis(Analysis(shares=[10, 20], layers=layers, notes=[]), tmp_path / "analysis.png")
    monkeypatch.undo()
    pyplot.close(figures[0])
    energy, heat, by_layer = figures[0].axes[:3]
    assert {line.get_label(): list(line.get_ydata()) for line in energy.get_lines()} == {
        "experts": [0.5, 0.9],
        "base": [0.5, 0.9],
    }
    assert heat.get_images()[0].get_array().tolist() == [[1.0, 0.25], [0.25, 1.0]]
    assert list(by_layer.get_lines()[0].get_xdata()) == [0, 3]
