"""Texts of an evaluation one by one: whose kind they are, and what several say together."""

import pytest
import torch

from moetool.calibration.windows import TextWindows
from moetool.measure.results import Divergence, OverTexts, TextLoss, short_names
from moetool.measure.texts import BatchedTexts, is_own_kind


@pytest.mark.parametrize(
    ("text", "calibration", "own"),
    [
        ("wiki.test.txt", ("wiki.valid.txt",), True),
        ("far/away/wiki_train.jsonl", ("perl.txt", "wiki.valid.txt"), True),
        ("perl.test.txt", ("wiki.valid.txt",), False),
        ("train.txt", ("test.txt",), False),
        ("train.txt", ("there/train.txt",), True),
        ("bundled:code", ("bundled",), True),
        ("bundled:code", ("mine.txt", "bundled:code"), True),
        ("bundled:code", ("bundled:dialogue",), False),
        ("owner/wiki:small:test", ("owner/wiki:small:validation",), True),
        ("owner/wiki:large:test", ("owner/wiki:small",), False),
        ("wiki.test.txt", (), None),
    ],
)
def test_own_kind_by_name(text: str, calibration: tuple[str, ...], own: bool | None) -> None:
    assert is_own_kind(text, calibration) is own


def test_no_batch_is_of_two_texts() -> None:
    texts = tuple(
        TextWindows(name, torch.full((count, 2), ord(name))) for name, count in (("a", 5), ("b", 1), ("c", 4))
    )
    batched = BatchedTexts(texts, 2)
    batches = batched.batches
    assert [len(rows) for rows in batches] == [2, 2, 1, 1, 2, 2]
    for text, own in batched.of_each:
        assert torch.equal(torch.cat(batches[own]), text.windows)


def lost(name: str, kl: float, own: bool | None) -> TextLoss:
    against = Divergence(model="m", perplexity=1, nll=0, excess=0, excess_error=None, kl=kl, agreement=1)
    return TextLoss(name=name, perplexity=1, nll=0, windows=1, tokens=2, own_kind=own, against=against)


def test_mean_worst_and_abroad() -> None:
    found = OverTexts.of([lost("home", 0.1, True), lost("here", 0.3, True), lost("perl", 0.8, False)])
    assert found is not None
    assert (found.kl_mean, found.kl_worst, found.worst_text) == (pytest.approx(0.4), 0.8, "perl")
    assert (found.kl_own, found.abroad) == (pytest.approx(0.2), pytest.approx(4))
    assert OverTexts.of([lost("home", 0.1, True)]) is None
    unknown = OverTexts.of([lost("a", 0.1, None), lost("b", 0.3, None)])
    assert unknown is not None
    assert (unknown.kl_own, unknown.abroad) == (None, None)
    same = OverTexts.of([lost("home", 0.0, True), lost("perl", 0.0, False)])
    assert same is not None
    assert same.abroad is None


def test_names_are_short_where_that_tells_them_apart() -> None:
    assert short_names(["x/a.txt", "y/b.txt", "bundled:code"]) == ["a.txt", "b.txt", "bundled:code"]
    assert short_names(["x/a.txt", "y/a.txt"]) == ["x/a.txt", "y/a.txt"]
