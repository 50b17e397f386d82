"""The bundled text as a tokenizer reads it, and no more of it than is due."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from moetool.calibration import readable
from moetool.calibration.bundled import BundledPiece, kinds, texts
from moetool.calibration.readable import BundledWindows, left_out_remark, readable_text
from moetool.calibration.windows import drawn_windows

LENGTH = 64


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all texts that are tokenized, in characters."""
    sizes: list[int] = []
    ids = readable._ids

    def counted(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        sizes.append(len(text))
        return ids(text, tokenizer)

    monkeypatch.setattr(readable, "_ids", counted)
    return sizes


def test_as_many_windows_of_each_kind(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    samples = 2 * len(kinds())
    drawn = drawn_windows("bundled", tiny_tokenizer, samples=samples, more=8, sequence_length=LENGTH, seed=1)
    assert drawn.windows.shape == (samples, LENGTH)
    assert drawn.others.shape == (8, LENGTH)
    both = [tuple(window) for window in torch.cat([drawn.windows, drawn.others]).tolist()]
    assert len(set(both)) == len(both)  # none twice
    assert drawn.kinds == kinds()
    assert torch.bincount(drawn.of_kind).tolist() == [2] * len(kinds())
    assert torch.bincount(drawn.others_of_kind).tolist() == [1] * len(kinds())
    for window, number in zip(both, torch.cat([drawn.of_kind, drawn.others_of_kind]).tolist(), strict=True):
        whole = tiny_tokenizer.decode(window).strip("\N{REPLACEMENT CHARACTER}")  # of characters cut in two
        assert any(whole in text for text in texts(kinds()[number])) or whole in "".join(texts(kinds()[number]))


def test_a_window_is_put_together_of_passages(
    tiny_tokenizer: PreTrainedTokenizerFast, pieces: Callable[..., None]
) -> None:
    """Each from another place, none twice, the last cut to fit; a short window is one passage."""
    text = "".join(f"{number * 7919} {number * 104_729}\n" for number in range(1, 4000))
    pieces(BundledPiece("prose", "numbers", text))
    ids = tiny_tokenizer(text)["input_ids"]
    places = {tuple(ids[first : first + 64]): first for first in range(len(ids) - 63)}
    found = list[int]()
    for window in BundledWindows({"prose": 3}, tiny_tokenizer, length=255, seed=0).drawn["prose"]:
        assert len(window) == 255
        parts = [*window.split(64)]
        found += [places[tuple(part.tolist())] for part in parts[:3]]
        assert any(key[:63] == tuple(parts[3].tolist()) for key in places)
    assert min(abs(one - other) for one, other in pairwise(sorted(found))) >= 64
    assert sum(abs(two - one) == 64 for one, two in pairwise(found)) < 3
    [short] = BundledWindows({"prose": 1}, tiny_tokenizer, length=95, seed=0).drawn["prose"]
    assert tiny_tokenizer.decode(short) in text


def test_a_kind_of_which_there_is_no_window_is_none(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    drawn = drawn_windows("bundled", tiny_tokenizer, samples=2, more=1, sequence_length=LENGTH, seed=1)
    assert drawn.kinds == kinds()[:2]
    assert drawn.of_kind.tolist() == [0, 1]


def test_little_more_is_read_than_is_due(tiny_tokenizer: PreTrainedTokenizerFast, read: list[int]) -> None:
    """Beside what judges the pieces some ten characters per token, of three megabytes."""
    drawn_windows("bundled", tiny_tokenizer, samples=16, more=0, sequence_length=256, seed=0)
    judged = sum(size for size in read if size <= 512)
    assert 0 < sum(read) - judged < 2 * 16 * 256 * 10


def test_what_is_held_out_changes_no_window_and_is_none_of_them(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    few, many = (
        drawn_windows("bundled", tiny_tokenizer, samples=16, more=more, sequence_length=LENGTH, seed=5)
        for more in (0, 64)
    )
    assert torch.equal(few.windows, many.windows)
    assert not {*map(tuple, many.windows.tolist())} & {*map(tuple, many.others.tolist())}
    assert len(many.others) == 64


def test_a_seed_draws_the_same_and_another_does_not(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    one, again, other = (
        drawn_windows("bundled", tiny_tokenizer, samples=8, more=4, sequence_length=LENGTH, seed=seed)
        for seed in (3, 3, 4)
    )
    assert torch.equal(one.windows, again.windows)
    assert torch.equal(one.others, again.others)
    shared = {*map(tuple, one.windows.tolist())} & {*map(tuple, other.windows.tolist())}
    assert len(shared) < 2


def test_all_of_a_kind_can_be_had(tiny_tokenizer: PreTrainedTokenizerFast, pieces: Callable[..., None]) -> None:
    """With every span read, what follows the first window of each is taken, too, until nothing is left."""
    text = "".join(f"{number * 7919} {number * 104_729}\n" for number in range(1, 1000))
    pieces(BundledPiece("prose", "numbers", text))
    tokens = len(tiny_tokenizer(text)["input_ids"])
    bundled = BundledWindows({"prose": 4}, tiny_tokenizer, length=16, seed=0)
    more = bundled.take({"prose": 10_000})
    both = [tuple(window.tolist()) for window in [*bundled.drawn["prose"], *more["prose"]]]
    assert len(bundled.drawn["prose"]) == 4
    assert 0.5 * tokens < 16 * len(both) <= tokens
    assert len(set(both)) == len(both)
    assert bundled.take({"prose": 1}) == {"prose": []}


def test_kinds_with_too_few_windows_are_made_up_for(
    tiny_tokenizer: PreTrainedTokenizerFast, pieces: Callable[..., None]
) -> None:
    pieces(
        BundledPiece("code", "much", "".join(f"let {number} be {number}\n" for number in range(2000))),
        BundledPiece("dialogue", "hardly any", "Yes, said she, and no.\n"),
        BundledPiece("prose", "much", "".join(f"{number} men and {number} horses\n" for number in range(2000))),
    )
    due = {"code": 4, "dialogue": 4, "prose": 4}
    bundled = BundledWindows(due, tiny_tokenizer, length=32, seed=0)
    assert {kind: len(found) for kind, found in bundled.drawn.items()} == {"code": 6, "dialogue": 0, "prose": 6}
    assert list(bundled.remarks()) == [
        "Kinds of the bundled text with too few windows of this length: dialogue 0 of 4; others stand in."
    ]
    assert {kind: len(found) for kind, found in bundled.take(due).items()} == {"code": 6, "dialogue": 0, "prose": 6}


def test_of_one_kind_alone_what_it_lacks_is_told_once(
    tiny_tokenizer: PreTrainedTokenizerFast, pieces: Callable[..., None]
) -> None:
    pieces(BundledPiece("prose", "short", "Yes, said she, and no, said he, and that was all.\n"))
    tokens = len(tiny_tokenizer(readable.pieces()[0].text)["input_ids"])
    bundled = BundledWindows({"prose": 3}, tiny_tokenizer, length=tokens, seed=0)
    assert list(bundled.remarks()) == ["The bundled text has 1 window of this length, not 3."]


def test_pieces_that_are_cut_into_bytes_are_left_out(
    tiny_tokenizer: PreTrainedTokenizerFast, pieces: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tokenizer for one language does with another's letters; digits, which many cut apart, do not count."""
    words = "the quick brown fox jumps over the lazy dog " * 40
    pieces(
        BundledPiece("prose", "plain", words),
        BundledPiece("prose", "numbers", words[:400] + "0123456789 " * 400),
        BundledPiece("other", "torn", "\u0416\u0448\u0449 " * 400),
    )
    monkeypatch.setattr(readable, "_ids", lambda text, tokenizer: [0] * _cost(text))
    found = readable_text(("prose", "other"), tiny_tokenizer)
    assert found.left_out == ("other/torn",)
    assert set(found.texts) == {"prose"}
    assert readable_text(("prose",), tiny_tokenizer).left_out == ()
    bundled = BundledWindows({"other": 2, "prose": 2}, tiny_tokenizer, length=8, seed=0)
    assert {kind: len(own) for kind, own in bundled.drawn.items()} == {"other": 0, "prose": 4}
    assert list(bundled.remarks()) == [
        "Of the bundled text 1 piece is left out, since this tokenizer splits their words into bytes: other/torn.",
        "Kinds of the bundled text of which it can read nothing: other; others stand in.",
    ]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`pieces(*them)` makes these the bundled text."""
    return lambda *them: monkeypatch.setattr(readable, "pieces", lambda: them)


def _cost(text: str) -> int:
    """Tokens of a tokenizer that knows English words, and cuts anything else into bytes."""
    return sum(1 if word.isascii() and word.isalpha() else len(word.encode()) for word in text.split())


def test_many_pieces_that_are_left_out_are_counted_by_kind() -> None:
    names = [*(f"languages/{number}" for number in range(5)), "code/one"]
    assert left_out_remark(names).endswith("to bytes: 5 of languages, 1 of code.")
