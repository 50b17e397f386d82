"""Moments of what feed-forward networks are given, against the inputs themselves."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from upcycled import load, open_dense, save_dense

from moetool.calibration.streaming import StreamedModel
from moetool.convert.inputs import InputMoments, prompt_moments, watched_inputs


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 3


def test_moments_are_those_of_all_rows_together() -> None:
    first, second, third = inputs(2, 5, 8), inputs(7, 8, seed=1), inputs(1, 3, 8, seed=2)
    moments = InputMoments(3, 8)
    for group, batch in ((0, first), (2, second), (0, third)):
        moments.add(group, batch)
    groups = [torch.cat([first.view(-1, 8), third.view(-1, 8)]), torch.zeros(0, 8), second]
    rows = torch.cat(groups)
    assert moments.count.tolist() == [13, 0, 7]
    torch.testing.assert_close(moments.means[0], groups[0].mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.means[2], groups[2].mean(0), rtol=1e-12, atol=0)
    assert moments.means[1].equal(torch.zeros(8).double())
    torch.testing.assert_close(moments.mean, rows.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.covariance, rows.T.cov(correction=0), rtol=1e-10, atol=1e-12)


def test_sums_are_exact_in_half_precision() -> None:
    """In steps of one, fp16 counts to 2,048 and bf16 to 256."""
    for dtype in (torch.float16, torch.bfloat16):
        moments = InputMoments(1, 4)
        moments.add(0, torch.ones(8192, 4, dtype=dtype))
        assert moments.total.tolist() == [[8192.0] * 4]


def test_watching_ends_with_the_block() -> None:
    seen: list[Tensor] = []
    linear = nn.Linear(2, 2)
    with watched_inputs(linear, seen.append):
        linear(torch.ones(1, 2))
    with pytest.raises(ZeroDivisionError), watched_inputs(linear, seen.append):
        raise ZeroDivisionError
    linear(torch.zeros(1, 2))
    assert [tensor.tolist() for tensor in seen] == [[[1.0, 1.0]]]


@pytest.mark.parametrize("family", ["qwen3", "phi"])
def test_prompt_moments_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", family))
    draw = torch.Generator().manual_seed(0)
    prompts = [
        [torch.randint(1, 288, (length,), generator=draw) for length in lengths] for lengths in ((5, 9), (), (7,))
    ]
    ticks: list[int] = []
    streamed = StreamedModel(dense.checkpoint, dense.architecture, torch.float32, torch.device("cpu"))
    found = prompt_moments(streamed, prompts, dense.architecture.ffn, lambda: ticks.append(1))
    assert len(found) == len(ticks) == 3
    whole = load(tmp_path / "dense")
    for layer, moments in zip(whole.model.layers, found, strict=True):
        assert moments.count.tolist() == [14, 0, 7]
        for group, texts in enumerate(prompts):
            seen: list[Tensor] = []
            with watched_inputs(layer.get_submodule(dense.architecture.ffn), seen.append), torch.no_grad():
                for text in texts:
                    whole(input_ids=text[None])
            if texts:
                mean = torch.cat([one[0] for one in seen]).double().mean(0)
                torch.testing.assert_close(moments.means[group], mean, rtol=1e-5, atol=1e-6)
