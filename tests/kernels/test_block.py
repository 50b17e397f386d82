"""A few tokens through a layer in one call give what its stages give one after the other."""

import itertools
from functools import partial

import pytest
import torch
from stored_experts import STORED, batch, distance, experts_of
from torch import Tensor

from moetool.compiled.compiler import problem
from moetool.kernels.rounding import exact_products
from moetool.runtime.modules.inference import KernelExperts

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
# Channels that a base lacks or skips and rotated activations are between the matrices; biases come on top.
IN_STAGES = {"dynamic", "mixture-on-base-with-biases"}  # every layer of these


def kernels_of(kind: str) -> list[KernelExperts]:
    """Those layers that run in one call."""
    made = [experts._kernels.of(experts) for experts in experts_of(kind)]
    return [kernels for kernels in made if kernels is not None and kernels._block is not None]


def given(kind: str, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return batch(experts_of(kind)[0], tokens, dtype)


def in_stages(kernels: KernelExperts, *given: Tensor) -> Tensor:
    block, kernels._block = kernels._block, None
    try:
        return kernels.forward(*given)
    finally:
        kernels._block = block


@pytest.mark.parametrize("kind", STORED)
def test_which_layers_are_one_call(kind: str) -> None:
    assert bool(kernels_of(kind)) == (kind not in IN_STAGES)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [kind for kind in STORED if kind not in IN_STAGES])
def test_it_gives_what_stages_give(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit where torch's exponential is Sleef's and the processor has FMA; anywhere as near as fp32 is."""
    monkeypatch.delenv("MOETOOL_KERNELS")
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for kernels, tokens in itertools.product(kernels_of(kind), (1, 3, 4)):
        hidden = given(kind, tokens, dtype)
        rounded = kernels.forward(*hidden)
        assert rounded.dtype == dtype
        assert distance(rounded, in_stages(kernels, *hidden)) < bound
        with exact_products():
            assert distance(kernels.forward(*hidden), in_stages(kernels, *hidden)) < bound


@torch.no_grad()
def test_in_any_instructions(instructions: str) -> None:
    for kernels in kernels_of("quantised"):
        assert distance(kernels.forward(*given("quantised", 4)), in_stages(kernels, *given("quantised", 4))) < 1e-5


SOME = pytest.mark.parametrize("kind", ["quantised", "no-base", "low-rank"])


@torch.no_grad()
@SOME
def test_any_number_of_threads_gives_the_same_bits(kind: str, request: pytest.FixtureRequest) -> None:
    kernels, tokens = kernels_of(kind)[0], given(kind, 4)
    alone = kernels.forward(*tokens)
    request.getfixturevalue("two_threads")
    assert all(kernels.forward(*tokens).equal(alone) for _ in range(20))


@torch.no_grad()
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@SOME
def test_a_token_that_is_not_finite_leaves_the_others_alone(kind: str, number: float) -> None:
    for kernels in kernels_of(kind):
        hidden, chosen, weights = given(kind, 4)
        clean = kernels.forward(hidden, chosen, weights)
        hidden[1, 5] = number
        found, expected = (run(hidden, chosen, weights) for run in (kernels.forward, partial(in_stages, kernels)))
        assert found[1].isnan().any()
        assert found[1].isnan().equal(expected[1].isnan())
        assert found[[0, 2, 3]].equal(clean[[0, 2, 3]])


@torch.no_grad()
@SOME
def test_experts_that_are_elsewhere_add_nothing(kind: str) -> None:
    for kernels in kernels_of(kind):
        hidden, chosen, weights = given(kind, 3)
        elsewhere = chosen.clone()
        elsewhere[:, 1] = torch.tensor([-1, len(kernels.roles["down"].table.products), 10**9])
        alone = kernels.forward(hidden, chosen[:, :1], weights[:, :1])
        assert distance(kernels.forward(hidden, elsewhere, weights), alone) < 1e-6
        assert not kernels.forward(hidden, torch.full_like(chosen, -1), weights).any()


@torch.no_grad()
def test_activations_where_exponentials_over_and_underflow() -> None:
    kernels = kernels_of("no-base")[0]
    hidden, chosen, weights = given("no-base", 1)
    for scale in (0, 1e-30, 1e2, 1e3, 1e4, 1e6):
        found = kernels.forward(hidden * scale, chosen, weights)
        expected = in_stages(kernels, hidden * scale, chosen, weights)
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
