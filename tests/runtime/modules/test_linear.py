"""Linear layers of compressed models multiply single tokens by kernels, and are ordinary ones in all else."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moetool.architectures import MoEShape
from moetool.compiled.compiler import problem
from moetool.format.layout import LayerLayout
from moetool.kernels import cpu, vector
from moetool.quiet import quiet
from moetool.representations.low_rank import LowRank
from moetool.runtime.modules.linear import TokenLinear, multiply_by_kernels


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(70, 40, bias, dtype=torch.bfloat16))
    multiply_by_kernels(made)
    return made[0]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every product by a kernel."""
    calls, run = [], vector.linear

    def linear(*given: Any) -> Tensor:
        calls.append(1)
        return run(*given)

    monkeypatch.setattr(vector, "linear", linear)
    return calls


@pytest.mark.skipif(bool(problem()), reason=problem())
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_one_token_by_a_kernel(bias: bool, counted: list[int]) -> None:
    own, tokens = layer(bias), torch.randn(2, 1, 70).bfloat16()
    found = torch.cat([own(token[None]) for token in tokens])
    assert len(counted) == 2
    assert (found - nn.Linear.forward(own, tokens)).abs().max() < 0.02
    assert own(tokens).shape == (2, 1, 40)
    assert len(counted) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_many_tokens_where_the_processor_has_no_products_of_16_bits(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in fp32, rounded once; a matrix is converted in parts, and the last of them is smaller."""
    monkeypatch.setattr(cpu, "lacks_products", lambda dtype: dtype != torch.float32)
    monkeypatch.setattr(cpu, "_PART", 70 * 16)
    own, tokens = layer(bias).to(dtype), torch.randn(2, 3, 70).to(dtype)
    wanted = F.linear(tokens.float(), own.weight.float(), own.bias.float() if bias else None)
    found = own(tokens)
    assert found.is_contiguous()
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
def test_gradients_and_graphs_are_torchs(counted: list[int]) -> None:
    own, token = layer(), torch.randn(1, 70).bfloat16()
    own(token).sum().backward()
    assert own.weight.grad is not None
    with torch.no_grad():
        traced = torch.jit.trace(own, token, check_trace=False)  # type: ignore[no-untyped-call]
        exported = torch.export.export(own, (token,)).module()
        assert not counted
        assert traced(token).equal(exported(token))


@torch.no_grad()
def test_copies_and_files() -> None:
    own, token = layer(), torch.randn(1, 70).bfloat16()
    for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert type(other) is TokenLinear
        assert other(token).equal(own(token))
        other.weight.zero_()
        assert other(token).equal(other.bias[None])


def test_of_compressed_models_alone(tiny_mixtral: Path, make_compressed: Any, tmp_path: Path) -> None:
    shape = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
    layout = LayerLayout(shape, dict.fromkeys(("gate", "up", "down"), (LowRank(3),) * 4), 48)
    paths = tiny_mixtral, make_compressed(tiny_mixtral, tmp_path / "compressed", {0: layout})
    with quiet():
        before, after = map(AutoModelForCausalLM.from_pretrained, paths)
    assert type(before.lm_head) is nn.Linear
    assert type(after.lm_head) is TokenLinear


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@torch.no_grad()
def test_layers_without_inputs_are_torchs() -> None:
    """As a shared expert of no width has: what they give is the bias alone."""
    made = nn.Sequential(nn.Linear(0, 8, dtype=torch.bfloat16))
    nn.init.ones_(made[0].bias)
    multiply_by_kernels(made)
    for tokens in (1, 9):
        assert made(torch.zeros(tokens, 0, dtype=torch.bfloat16)).eq(1).all()
