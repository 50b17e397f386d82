"""`moetool tune --balance-bias`: biases that only the choice of experts sees, moved towards even use."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import load, tensors_of
from torch import Tensor

from moetool.runtime.modules.routers import Routers, is_choice_bias
from moetool.tune.bias_balance import router_biases

STEPS, RATE = 40, 0.01
# Next to nothing is learnt but the biases.
SHORT = ("--sequence-length", 64, "--batch-size", 4, "--learning-rate", 1e-9, "--steps", STEPS, "--balance-bias", RATE)


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = save_model(families.build("deepseek_v3"), tmp_path_factory.mktemp("source") / "model")
    return found


def use(path: Path, tokens: Tensor) -> dict[str, Tensor]:
    """Choices of each expert, by its router's bias."""
    model = load(path)
    routers = Routers(model)
    biases = router_biases(model, routers)
    with torch.no_grad(), routers.watched():
        model(input_ids=tokens, use_cache=False)
    names = {id(tensor): name for name, tensor in model.named_buffers()}
    return {
        names[id(biases[router])]: torch.bincount(chosen.flatten(), minlength=len(biases[router]))
        for router, chosen in zip(routers.ran, routers.chosen, strict=True)
        if chosen is not None
    }


def test_experts_are_used_more_evenly(
    run_cli: Any, source: Path, tiny_text: Path, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    result = run_cli("tune", source, tmp_path / "out", *SHORT, "--data", tiny_text)
    assert result.code == 0, result.stderr
    tokens = tiny_tokens[:512].view(8, 64)
    before, after = use(source, tokens), use(tmp_path / "out", tokens)
    assert before.keys() == after.keys()
    assert len(before) == 2
    for name, counts in before.items():
        assert after[name].float().std() < 0.5 * counts.float().std()
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    for name in filter(is_choice_bias, old):
        moved = (new[name] - old[name]) / RATE
        torch.testing.assert_close(moved, moved.round(), atol=1e-3, rtol=0)
        assert 0 < moved.abs().max() <= STEPS
        busiest = before[name].argmax()
        assert moved[busiest] < 0 < moved[before[name].argmin()]


def test_a_killed_run_continues(crash: Any, source: Path, tiny_text: Path, tmp_path: Path) -> None:
    """From its last checkpoint, which has the biases; the result is the same to the byte."""
    arguments = ("tune", source, *SHORT, "--data", tiny_text, "--save-every", 5)
    changes = crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, changes // 2, tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "have no bias that only the choice of experts sees"), (("--train", "task-experts"), "leaves routers")],
)
def test_what_has_no_bias_to_move_is_refused(
    options: tuple[str, ...], said: str, run_cli: Any, source: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = source if options else tiny_mixtral
    result = run_cli("tune", model, tmp_path / "out", *SHORT, "--data", tiny_text, *options, "--dry-run")
    assert result.code == 2
    assert said in result.stderr
