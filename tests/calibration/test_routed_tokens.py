"""What the experts of a layer are given: all of it, and some of it evenly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetool.calibration.held_experts import RoutedBatch
from moetool.calibration.peers import Peers
from moetool.calibration.routed_tokens import RoutedTokens

WINDOWS, LENGTH, HIDDEN, EXPERTS, TOP = 4, 5, 3, 4, 2
TOKENS = WINDOWS * LENGTH
ALL = torch.ones(WINDOWS, dtype=torch.bool)
CPU = torch.device("cpu")


@pytest.fixture
def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, HIDDEN, generator=stream).bfloat16()
    weights, index = torch.rand(TOKENS, EXPERTS - 1, generator=stream).topk(TOP)  # the last expert is given nothing
    return inputs, weights, index


@pytest.fixture
def noted(given, tmp_path: Path) -> RoutedTokens:
    inputs, weights, index = given
    sweep: Any = SimpleNamespace(
        peers=Peers(),
        length=LENGTH,
        count=WINDOWS,
        own=range(WINDOWS),
        directory=tmp_path,
        model=SimpleNamespace(hidden_size=HIDDEN),
    )
    found = RoutedTokens(sweep, 0)
    for rows in (slice(0, 2 * LENGTH), slice(2 * LENGTH, TOKENS)):
        found.observe_inputs(inputs[rows].float(), RoutedBatch(index[rows], weights[rows], EXPERTS))
    found.reduce(Peers())
    return found


def test_every_token_with_the_weights_of_all_experts(noted, given) -> None:
    inputs, weights, index = given
    text = noted.text(range(EXPERTS), ALL, TOKENS, CPU)
    assert torch.equal(text.inputs, inputs)
    assert torch.equal(text.weights, torch.zeros(TOKENS, EXPERTS).scatter(1, index, weights))


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_tokens_of_one_expert_in_some_windows(noted, given, expert: int) -> None:
    inputs, weights, index = given
    windows = torch.tensor([False, True, False, True])
    mine = (index == expert).any(1) & windows.repeat_interleave(LENGTH)
    text = noted.text(range(expert, expert + 1), windows, TOKENS, CPU)
    rows, own, factors = text.of(expert)
    assert torch.equal(text.inputs, inputs[mine])
    assert torch.equal(own, inputs[mine].float())
    assert torch.equal(rows, torch.arange(int(mine.sum())))
    assert torch.equal(factors[:, 0], weights[index == expert][mine[(index == expert).any(1)]])


def test_no_more_than_are_wanted_evenly(noted, given) -> None:
    text = noted.text(range(EXPERTS), ALL, 10, CPU)
    assert torch.equal(text.inputs, given[0][::2])


def test_files_are_gone_in_the_end(noted, tmp_path: Path) -> None:
    with noted.kept():
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
