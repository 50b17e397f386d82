"""Values in the words of a page."""

import pytest

from moetool.report.parts import plain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (True, "yes"),
        (12_345, "12,345"),
        (0.42, "0.42"),
        (["attention", "embeddings"], "attention,embeddings"),
        ([], "–"),
    ],
)
def test_options_in_words(value: object, words: str) -> None:
    assert plain(value) == words
