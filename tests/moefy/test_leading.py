"""Which projection of a network chooses its neurons, and what its values are worth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES, MOEFY_FAMILIES
from sampling import DENSE_STRUCTURES, sampled

from moetool.calibration.streaming import StreamedModel
from moetool.moefy.leading import leading_projection
from moetool.moefy.statistics import SampledNetwork
from moetool.runtime.dense import DenseModel


@contextmanager
def sampled_network(dense: DenseModel, tokens: int = 200) -> Iterator[SampledNetwork]:
    """The network of the second layer, with random inputs."""
    model = StreamedModel(dense.checkpoint, dense.architecture, torch.float32, torch.device("cpu"))
    with model.layer(1) as layer:
        inputs = torch.randn(tokens, dense.hidden, generator=torch.Generator().manual_seed(0))
        yield SampledNetwork(layer, dense.architecture, inputs)


@pytest.mark.parametrize("family", sampled((*DENSE_FAMILIES, *MOEFY_FAMILIES), (*DENSE_STRUCTURES, "bert")))
def test_factors_multiply_to_activations(family: str, opened: Callable[[str], DenseModel]) -> None:
    dense = opened(family)
    with sampled_network(dense, 30) as network:
        (factors,), (activations,) = network.factors(), network.activations()
        assert set(factors) == ({"gate", "up"} if "gate" in dense.architecture.roles else {"up"})
        torch.testing.assert_close(torch.stack([*factors.values()]).prod(0), activations)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_centres_keep_the_mean_output_and_shares_are_those_of_the_choice(
    family: str, opened: Callable[[str], DenseModel]
) -> None:
    with sampled_network(opened(family)) as network:
        found = leading_projection(network, 20)
        (factors,), activations = network.factors(), next(network.activations()).double()
        norms = network.output_norms().double().square()
    other = factors["up" if found.lead == "gate" else "gate"] if len(factors) == 2 else torch.ones(1)
    torch.testing.assert_close(found.price, (norms * other.double().square().mean(0)).float())
    index = (factors[found.lead].square() * found.price).topk(20).indices
    used = torch.zeros_like(activations).scatter(1, index, 1.0)
    kept = torch.where(used > 0, activations, found.centre)
    torch.testing.assert_close(kept.mean(0), activations.mean(0))
    energy = activations.square() * norms
    share = ((energy * used).sum(1) / energy.sum(1)).mean().item()
    assert found.captured == pytest.approx(share, abs=1e-5)
    assert found.captured <= found.best <= 1
    if len(factors) == 1:
        assert (found.captured, found.accuracy) == (found.best, 1)


@pytest.mark.parametrize("lead", ["gate", "up"])
def test_the_projection_that_tells_more_leads(lead: str) -> None:
    class Network:
        inputs = torch.zeros(500, 1)

        def output_norms(self) -> torch.Tensor:
            return torch.ones(16)

        def factors(self) -> Any:
            draw = torch.Generator().manual_seed(0)
            wild, tame = torch.randn(500, 16, generator=draw).exp(), 1 + 0.1 * torch.rand(500, 16, generator=draw)
            yield {"gate": wild, "up": tame} if lead == "gate" else {"gate": tame, "up": wild}

    found = leading_projection(Network(), 4)  # type: ignore[arg-type]
    assert found.lead == lead
    assert found.captured > 0.99 * found.best
