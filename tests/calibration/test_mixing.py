"""Windows of several texts in one calibration set, and the bundled text as a tokenizer reads it."""

import torch
from transformers import PreTrainedTokenizerFast

from moetool.calibration import mixing
from moetool.calibration.bundled import BundledPiece, kinds
from moetool.calibration.data import DataSpec
from moetool.calibration.mixing import bundled_tokens, filled_shares, interleaved_windows
from moetool.calibration.windows import drawn_windows


def test_windows_take_turns_in_proportion() -> None:
    parts = [torch.full((count, 2), float(which)) for which, count in enumerate((4, 2, 1))]
    assert interleaved_windows(parts)[:, 0].tolist() == [0, 1, 0, 2, 0, 1, 0]
    assert interleaved_windows(parts[:1]) is parts[0]
    assert interleaved_windows([parts[0][:0], parts[1][:0]]).shape == (0, 2)


def test_kinds_with_too_few_windows_are_made_up_for() -> None:
    assert filled_shares([4, 4, 4], [9, 1, 6]) == [7, 1, 4]
    assert filled_shares([2, 2], [1, 1]) == [1, 1]
    assert filled_shares([2, 2], [5, 5]) == [2, 2]


def test_as_many_windows_of_each_kind(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    drawn = drawn_windows("bundled", tiny_tokenizer, samples=2 * len(kinds()), more=8, sequence_length=64, seed=1)
    assert drawn.windows.shape == (2 * len(kinds()), 64)
    assert drawn.others.shape == (8, 64)
    both = [tuple(window) for window in torch.cat([drawn.windows, drawn.others]).tolist()]
    assert len(set(both)) == len(both)  # none twice
    ids = bundled_tokens(DataSpec("bundled"), tiny_tokenizer).tokens
    assert set(ids) == set(kinds())
    found = dict.fromkeys(kinds(), 0)
    streams = {kind: " " + " ".join(map(str, tokens.tolist())) + " " for kind, tokens in ids.items()}
    for window in drawn.windows.tolist():
        kind = next(kind for kind, stream in streams.items() if f" {' '.join(map(str, window))} " in stream)
        found[kind] += 1
    assert set(found.values()) == {2}


def test_pieces_that_are_cut_into_bytes_are_left_out(tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch) -> None:
    """As a tokenizer for one language does with another's letters; digits, which many cut apart, do not count."""
    words = "the quick brown fox jumps over the lazy dog " * 40
    given = (
        BundledPiece("prose", "plain", words),
        BundledPiece("prose", "numbers", words[:400] + "0123456789 " * 400),
        BundledPiece("other", "torn", "\u0416\u0448\u0449 " * 400),
    )
    monkeypatch.setattr(mixing, "pieces", lambda: given)
    monkeypatch.setattr(mixing, "bundled_kinds", lambda spec: ("prose", "other"))
    monkeypatch.setattr(mixing, "_ids", lambda text, tokenizer: [0] * _cost(text))
    read = bundled_tokens(DataSpec("bundled"), tiny_tokenizer)
    assert read.left_out == ("other/torn",)
    assert set(read.tokens) == {"prose"}


def _cost(text: str) -> int:
    """Tokens of a tokenizer that knows English words, and cuts anything else into bytes."""
    return sum(1 if word.isascii() and word.isalpha() else len(word.encode()) for word in text.split())
