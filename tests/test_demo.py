"""The demo's training."""

import pytest
import torch

from moetool import demo
from moetool.job.progress import Progress


@pytest.mark.parametrize("steps", [1, 2])
def test_a_few_steps_are_enough(steps: int) -> None:
    """However few, of which the first is at the full rate."""
    model, tokens = demo.build_model(0), torch.arange(demo.LENGTH + 1)
    before = model.lm_head.weight.clone()
    demo.train(model, tokens, steps, 1e-3, 0, Progress(), "Train")
    assert (model.lm_head.weight - before).abs().max().item() == pytest.approx(1e-3 * steps, rel=0.6)
