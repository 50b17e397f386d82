"""The text for a model of which nothing else is known."""

from typing import Any

import torch

from moetool.convert.stage import sample_text, sample_tokens


def test_the_text_is_prose_of_some_length() -> None:
    text = sample_text()
    assert len(text) > 10_000
    assert "assert" in text
    assert "class" in text


def test_tokens_are_those_of_the_text(tiny_tokenizer: Any) -> None:
    tokens = sample_tokens(tiny_tokenizer, 288, 3, 16)
    assert tokens.shape == (3, 16)
    assert tokens.dtype == torch.int64
    expected = tiny_tokenizer(sample_text(), verbose=False)["input_ids"][:48]
    assert tokens.flatten().tolist() == expected


def test_a_short_text_is_repeated() -> None:
    tokens = sample_tokens(lambda *_, **__: {"input_ids": [5, 6, 7]}, 288, 2, 4)
    assert tokens.tolist() == [[5, 6, 7, 5], [6, 7, 5, 6]]


def test_without_a_tokenizer_every_id_has_its_turn() -> None:
    for vocabulary in (7, 288, 320):
        tokens = sample_tokens(None, vocabulary, 4, 80)
        assert tokens.shape == (4, 80)
        assert set(tokens.flatten().tolist()) == set(range(vocabulary))
