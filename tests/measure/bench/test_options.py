"""Lists of numbers on the command line, and prompts as long as models go."""

from pathlib import Path
from typing import Any

import pytest

from moetool.checkpoint.reader import Checkpoint
from moetool.cli.generate import build_options
from moetool.errors import UsageError
from moetool.measure.bench.options import BenchOptions, fit_lengths


def given(**typed: Any) -> BenchOptions:
    return build_options(BenchOptions, typed)


def test_numbers_with_commas() -> None:
    assert given(batch=["1,8", "16"]).batch == (1, 8, 16)
    assert given(lengths=["64"]).lengths == (64,)
    assert BenchOptions(batch=(2, 3)).batch == (2, 3)
    assert given().lengths == (128, 512)


@pytest.mark.parametrize("wrong", ["0", "1,,2", "1;2", "-3", "1.5", ""])
def test_what_is_no_list_of_numbers(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"--batch .*whole numbers above 0"):
        given(batch=[wrong])


def test_lengths_that_were_not_asked_for_fit(tiny_mixtral: Path) -> None:
    checkpoint = Checkpoint.open(tiny_mixtral)  # 128 positions
    assert fit_lengths(given(), checkpoint).lengths == (96,)
    assert fit_lengths(given(new_tokens=0), checkpoint).lengths == (128,)
    assert fit_lengths(given(lengths=["100,28"], new_tokens=28), checkpoint).lengths == (100, 28)


def test_lengths_that_were_asked_for_are_refused(tiny_mixtral: Path) -> None:
    checkpoint = Checkpoint.open(tiny_mixtral)
    with pytest.raises(UsageError, match="--lengths 101: 101 tokens and 28 new ones are more than the 128 positions"):
        fit_lengths(given(lengths=["8,101"], new_tokens=28), checkpoint)
    with pytest.raises(UsageError, match="more than the 128 positions"):
        fit_lengths(given(new_tokens=128), checkpoint)
