"""Layers of which some experts at a time are in memory, against the same with all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from derived_families import DERIVED
from families import build
from sampling import sampled
from torch import Tensor

from moetool.architectures import Role
from moetool.calibration.collectors import (
    BaseGramCollector,
    FisherCollector,
    GramCollector,
    RegressionCollector,
    UsageCollector,
)
from moetool.calibration.held_experts import working_sets
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.recorded import spread
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.reader import Checkpoint
from moetool.format.families import architecture_of
from moetool.quiet import quiet

WINDOWS, LENGTH = 5, 24
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe", "deepseek_v3", "granitemoeshared", "zaya"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    with quiet():
        only = {"mlp_only_layers": []} if request.param == "qwen2_moe" else {}
        own = {**DERIVED.get(request.param, {}), "num_hidden_layers": 2, **only}
        build(request.param, **own).save_pretrained(directory)
    return directory


class Passed:
    """One forward and one backward pass of everything that is collected, `at_once` experts in memory."""

    def __init__(self, path: Path, windows: Tensor, directory: Path, at_once: int | None) -> None:
        checkpoint = Checkpoint.open(path)
        directory.mkdir()
        self.ticks = 0
        model = StreamedModel(
            checkpoint, architecture_of(checkpoint.config), torch.float32, CPU, experts_at_once=at_once
        )
        assert model.experts is not None
        shape = self.shape = model.experts.shape
        self.sweep = sweep = Sweep(model, windows, directory, self._tick)
        sweep.batch_size = 2
        self.forward: dict[str, Any] = {}
        self.backward: dict[str, Any] = {}
        base = torch.randn(shape.matrix("down"), generator=torch.Generator().manual_seed(0)) / shape.hidden
        sweep.embed()
        for index in range(2):
            with model.layer(index) as layer:
                self.forward = {
                    "usage": UsageCollector(shape),
                    "inputs": InputGramCollector(shape, CPU, at_once=at_once),
                    "base": BaseGramCollector(shape, base),
                    "grams": GramCollector(
                        shape,
                        lambda expert: model.matrix(expert, "down") - base,
                        windows.numel() * shape.top_k,
                        CPU,
                        at_once,
                    ),
                }
                is_moe = index == 1
                sweep.forward(index, layer, list(self.forward.values()) if is_moe else ())
                if is_moe:
                    self.gathered = gathered(self.forward["inputs"], self.forward["grams"], shape.roles)
        sweep.head()
        with model.layer(1) as layer:
            self.backward = {
                "usage": UsageCollector(shape),
                "fisher": FisherCollector(model.matrix, shape, CPU, None, sweep.loss_scale),
                "regression": RegressionCollector(shape, CPU),
            }
            sweep.backward(1, layer, list(self.backward.values()))

    def _tick(self) -> None:
        self.ticks += 1


def gathered(inputs: InputGramCollector, grams: GramCollector, roles: Sequence[Role]) -> dict[str, Tensor]:
    """Every Gram matrix, as those come to them who use them."""
    found = {f"{role}.{expert}": inputs.gram(expert, role).clone() for role, expert in inputs.matrices(roles)}
    for experts in grams.sets():
        for expert in experts:
            found[f"in.{expert}"] = grams.inputs[expert].matrix().clone()
            found[f"out.{expert}"] = grams.down[expert].matrix().clone()
    found |= {"mean.in": grams.inputs.mean(), "sample": grams.sample()} if grams.wide_down else {}
    return found | ({} if grams.wide_down else {"mean.down": grams.down.mean()})


@pytest.fixture(scope="module")
def windows(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)


@pytest.mark.parametrize("at_once", sampled([1, 3], [3]))
def test_sets_of_experts_are_the_whole_layer(path: Path, at_once: int, windows: Tensor, tmp_path: Path) -> None:
    """To the last bit where the same sums are formed in the same order; else to that of fp64, or for Fisher fp32."""
    whole = Passed(path, windows, tmp_path / "whole", None)
    parts = Passed(path, windows, tmp_path / "parts", at_once)
    assert len(parts.sweep.model.working_sets) > 1
    assert parts.ticks == whole.ticks
    for file in (Sweep.hidden, Sweep.gradient):
        found, expected = (file(passed.sweep, 2 if file is Sweep.hidden else 1) for passed in (parts, whole))
        assert found.read(0, WINDOWS).equal(expected.read(0, WINDOWS))
    assert not list((tmp_path / "parts").glob("scratch*"))

    assert parts.gathered.keys() == whole.gathered.keys()
    for name, expected in whole.gathered.items():
        tolerance = 1e-4 if expected.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(parts.gathered[name], expected, rtol=tolerance, atol=tolerance)
    for passes in ("forward", "backward"):
        found, expected = (getattr(passed, passes)["usage"] for passed in (parts, whole))
        assert found.tokens.equal(expected.tokens)
        assert found.channel_energy.equal(expected.channel_energy)
    assert parts.forward["inputs"].energy().equal(whole.forward["inputs"].energy())
    assert parts.forward["inputs"].tokens().equal(whole.forward["inputs"].tokens())
    assert parts.forward["grams"].energy.equal(whole.forward["grams"].energy)
    torch.testing.assert_close(parts.forward["base"].down.matrix(), whole.forward["base"].down.matrix())
    mine, theirs = (passed.backward["fisher"] for passed in (parts, whole))
    for role in whole.shape.roles:
        assert theirs.total[role].any()
        torch.testing.assert_close(mine.total[role], theirs.total[role])
        torch.testing.assert_close(mine.weighted[role], theirs.weighted[role], rtol=1e-5, atol=1e-7)
        assert mine.rows[role].equal(theirs.rows[role])
        for found, expected in zip(
            parts.backward["regression"].sums()[role], whole.backward["regression"].sums()[role], strict=True
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("experts", "at_once", "sizes"), [(8, 8, [8]), (8, 5, [4, 4]), (7, 3, [2, 2, 3]), (2, 0, [1, 1])]
)
def test_sets_are_about_as_large(experts: int, at_once: int, sizes: list[int]) -> None:
    sets = working_sets(experts, at_once)
    assert [len(own) for own in sets] == sizes
    assert [expert for own in sets for expert in own] == list(range(experts))


@pytest.mark.parametrize(("ticks", "steps"), [(3, 3), (3, 7), (7, 3), (1, 5)])
def test_steps_are_spread_over_ticks(ticks: int, steps: int) -> None:
    called: list[int] = []
    step = spread(lambda: called.append(1), ticks, steps)
    after = []
    for _ in range(steps):
        step()
        after.append(len(called))
    assert after[-1] == ticks
    assert all(abs(count - (number + 1) * ticks / steps) < 1 for number, count in enumerate(after))
