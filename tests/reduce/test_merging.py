"""What becomes of equal experts, of permuted neurons, of the router."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reduced import loaded, logits, made_of, weights
from safetensors.torch import save_file

from moetool.architectures import MoEShape
from moetool.job.job import Source
from moetool.reduce.choosing import Merged
from moetool.reduce.merging import matching_neurons, merged_matrix

FAMILIES = {
    "mixtral": {},
    "granitemoe": {},
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
}


def copies(path: Path, source: Path, *, experts: Sequence[int], permuted: bool) -> Path:
    """The same model with its first expert in the places of some others, too, their neurons in other orders."""
    shutil.copytree(source, path)
    opened, tensors = Source.open(source), weights(source)
    architecture, reader = opened.architecture, opened.experts
    for layer in reader.moe_layers:
        for expert in experts:
            order = torch.randperm(reader.shape.intermediate)
            for role in reader.shape.roles:
                own = reader.dense(layer, 0, role)
                if permuted:
                    own = own[:, order] if role == "down" else own[order]
                name, start = architecture.weight_name(layer, expert, role), len(own) if role == "up" else 0
                if architecture.is_fused:
                    tensors[name][expert, start : start + len(own)] = own
                else:
                    tensors[name] = own.contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module", params=list(FAMILIES))
def source(request: pytest.FixtureRequest, model_of: Any) -> Path:
    return model_of(request.param, **FAMILIES[request.param])


@pytest.mark.parametrize("method", ["hc-smoe", "m-smoe"])
def test_merging_equal_experts_changes_none(
    method: str, source: Path, reduce: Any, tiny_tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Where all experts are equal it does not matter to which a token goes: the merged model is the original. Neurons
    in another order are no hindrance where they are aligned."""
    shape = Source.open(source).experts.shape
    path = copies(tmp_path / "copies", source, experts=range(1, shape.experts), permuted=method == "m-smoe")
    output = Path(reduce(path, method, experts=shape.experts - 2).output)
    assert all(sum(map(len, experts)) == shape.experts for experts in made_of(output).values())
    tokens = tiny_tokens[2000:2064].view(2, 32)
    torch.testing.assert_close(logits(loaded(output), tokens), logits(loaded(path), tokens), rtol=1e-4, atol=1e-4)


def test_the_router_has_the_rows_of_the_most_used(source: Path, reduce: Any) -> None:
    result = reduce(source, "m-smoe", experts=2)
    before, after = weights(source), weights(Path(result.output))
    architecture = Source.open(source).architecture
    for layer, told in result.details.layers.items():
        rows = [max(one, key=lambda expert: told.tokens[expert]) for one in told.made_of]
        assert sorted(told.tokens[row] for row in rows) == sorted(told.tokens)[-2:]
        for name in (name for name in after if architecture.is_router(layer, name)):
            assert after[name].equal(before[name][rows])


def test_equal_experts_are_in_one_cluster(source: Path, reduce: Any, tmp_path: Path) -> None:
    path = copies(tmp_path / "copies", source, experts=[2], permuted=False)
    output = Path(reduce(path, "hc-smoe", experts=Source.open(source).experts.shape.experts - 1).output)
    assert all([0, 2] in experts for experts in made_of(output).values())


@pytest.fixture
def network() -> tuple[MoEShape, Callable[[Any], torch.Tensor]]:
    shape = MoEShape(2, 1, 8, 12)
    drawn = {role: torch.randn(shape.matrix(role), generator=torch.Generator().manual_seed(2)) for role in shape.roles}
    return shape, drawn.__getitem__


def test_permuted_neurons_are_found_again(network: Any) -> None:
    shape, reference = network
    order = torch.randperm(shape.intermediate, generator=torch.Generator().manual_seed(5))

    def other(role: Any) -> torch.Tensor:
        noise = 0.05 * torch.randn(shape.matrix(role))
        return (reference(role)[:, order] if role == "down" else reference(role)[order]) + noise

    assert matching_neurons(shape, reference, other).equal(order.argsort())


def test_a_merged_matrix_is_the_weighted_sum(network: Any) -> None:
    _, reference = network
    made = merged_matrix(
        lambda expert, role: reference(role) * (expert + 1), "up", Merged((2, 0), (0.75, 0.25)), {}, torch.float32
    )
    torch.testing.assert_close(made, reference("up") * 2.5)
