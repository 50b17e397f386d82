"""Linear layers and embeddings on codes: they compute what ordinary ones compute on the matrix that is stored."""

import copy
import pickle

import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

from moetool.kernels.products import problem
from moetool.representations.quantized import QuantizedMatrix, QuantizedWeight
from moetool.runtime.modules import quantized
from moetool.runtime.modules.quantized import QuantizedEmbedding, QuantizedLinear
from moetool.runtime.modules.quantized_in_model import dense_modules


def stored(rows: int = 24, columns: int = 32, dtype: torch.dtype = torch.float32, seed: int = 0) -> QuantizedWeight:
    form = QuantizedMatrix(8, 16)
    weight = form.build((rows, columns), dtype, torch.device("cpu"))
    assert isinstance(weight, QuantizedWeight)
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight.load_state_dict(form.encode(matrix, dtype))
    return weight


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def bias() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 24))


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("rows_at_once", [24, 7])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_linear_layer(tokens: int, rows_at_once: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and many, the matrix in one table or in several, on kernels and without any."""
    monkeypatch.setattr(quantized, "_MOST", 32 * rows_at_once)
    if not kernels:
        monkeypatch.setattr(quantized, "problem", lambda _: "there are none")
    layer, given = QuantizedLinear(stored(), bias()), inputs(tokens)
    expected = layer.dense(layer.matrix())(given)
    torch.testing.assert_close(layer(given), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(given), expected, rtol=1e-4, atol=1e-5)
    if kernels and not problem(torch.device("cpu")):
        assert len(layer._tables) == -(-24 // rows_at_once)


def test_gradients_reach_inputs_and_scales() -> None:
    layer, given = QuantizedLinear(stored(), bias()), inputs(3).requires_grad_()
    dense = layer.dense(layer.matrix())
    again = given.detach().requires_grad_()
    layer(given).square().sum().backward()
    dense(again).square().sum().backward()
    torch.testing.assert_close(given.grad, again.grad)
    scales = layer.stored.scales
    assert scales.grad is not None
    unscaled = layer.matrix().detach().view(24, 2, 16) / scales.detach().unsqueeze(2)
    torch.testing.assert_close(scales.grad, (dense.weight.grad.view(24, 2, 16) * unscaled).sum(2))
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding(dtype: torch.dtype) -> None:
    embedding = QuantizedEmbedding(stored(dtype=dtype), nn.Embedding(1, 1))
    tokens = torch.tensor([[0, 23, 5], [5, 5, 1]])
    assert embedding(tokens).equal(embedding.dense(embedding.matrix())(tokens))
    assert embedding(tokens).dtype == dtype
    assert embedding(tokens[:, :0]).shape == (2, 0, 32)
    for missing in (-1, 24):
        with pytest.raises(IndexError):
            embedding(torch.tensor([missing]))


@torch.no_grad()
def test_a_compiled_graph_has_it_as_one_step() -> None:
    torch._dynamo.reset()
    layer = QuantizedLinear(stored(), bias())
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for tokens in (1, 20):
        assert compiled(inputs(tokens)).equal(layer(inputs(tokens)))


def model() -> nn.ModuleDict:
    embedding = QuantizedEmbedding(stored(), nn.Embedding(1, 1))
    return nn.ModuleDict({"embedding": embedding, "head": QuantizedLinear(embedding.stored, bias(), embedding)})


@torch.no_grad()
def test_a_head_that_is_tied_has_nothing_of_its_own() -> None:
    tied = model()
    assert {name for name in tied.state_dict() if "moetool" in name} == {
        "embedding.moetool.codes",
        "embedding.moetool.scales",
    }
    expected = tied["head"](inputs(2))
    tied["embedding"].stored.scales.mul_(2)
    torch.testing.assert_close(tied["head"](inputs(2)) - bias(), 2 * (expected - bias()))
    dense_modules(tied)  # type: ignore[arg-type]
    assert isinstance(tied["head"], nn.Linear)
    assert tied["head"].weight is tied["embedding"].weight
    torch.testing.assert_close(tied["head"](inputs(2)) - bias(), 2 * (expected - bias()))


def test_tied_modules_have_one_weight_as_long_as_somebody_holds_it() -> None:
    """accelerate compares them, to have both in one group of FSDP."""
    tied = model()
    embedding, head = tied["embedding"], tied["head"]
    embedding.is_filled = head.is_filled = True
    held = head.weight
    assert embedding.weight is held
    tied.to(torch.bfloat16)
    assert embedding.weight is not held
    assert head.weight.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("how", ["copied", "pickled", "moved"])
def test_tables_are_made_anew(how: str) -> None:
    """They hold addresses: what was copied, pickled or cast has others."""
    tied = model()
    expected = tied["head"](inputs(2))
    if how == "moved":
        made = tied.to(torch.bfloat16)
        torch.testing.assert_close(made["head"](inputs(2)), expected, rtol=0.02, atol=0.02)
        return
    made = copy.deepcopy(tied) if how == "copied" else pickle.loads(pickle.dumps(tied))
    tied["embedding"].stored.scales.zero_()
    assert made["head"](inputs(2)).equal(expected)
    made["embedding"].stored.scales.zero_()
    assert made["head"](inputs(2)).equal(bias().expand_as(expected))


@pytest.mark.parametrize("how", ["made", "copied", "unpickled", "moved by torch"])
def test_what_moves_its_weight_leaves_a_placeholder(how: str) -> None:
    """Read, it is the matrix; registered, on any device, it is what the file has."""
    layer = QuantizedLinear(stored(), None)
    matrix, layer.is_filled = layer.matrix(), True
    if how == "copied":
        [layer] = copy.deepcopy(nn.ModuleList([layer]))
    elif how == "unpickled":
        layer = pickle.loads(pickle.dumps(layer))
    elif how == "moved by torch":
        layer.to("meta")
        layer = layer.to_empty(device="cpu")
        layer.stored.load_state_dict(stored().state_dict())
    assert layer.weight.shape == (24, 32)
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight is layer._parameters["weight"]
    assert layer.weight.shape == (1, 1)
    set_module_tensor_to_device(layer, "weight", "cpu", torch.zeros(1, 1))
    assert layer.state_dict()["weight"].equal(torch.zeros(1, 1))
    assert (layer.weight + 0).equal(matrix)
    assert type(layer._parameters["weight"])(layer.weight + 0).shape == (1, 1)


def test_its_weight_moved_is_the_matrix() -> None:
    layer = QuantizedLinear(stored(), None)
    matrix, layer.is_filled = layer.matrix(), True
    weight = layer.weight
    assert weight.to("cpu", torch.float32) is weight
    assert weight.to(torch.float64).equal(matrix.double())
    assert type(weight.to("cpu", copy=True)) is Tensor
    assert weight.to("meta").shape == (24, 32)


def test_embeddings_that_multiply_what_they_look_up() -> None:
    """As Gemma's do, in codes and made dense again."""
    plain = QuantizedEmbedding(stored(), nn.Embedding(1, 1))
    scaled = QuantizedEmbedding(plain.stored, Gemma4TextScaledWordEmbedding(1, 1, 0, 3.0))
    tokens = torch.tensor([0, 3, 1])
    torch.testing.assert_close(scaled(tokens), 3 * plain(tokens))
    torch.testing.assert_close(scaled.dense(scaled.matrix())(tokens), scaled(tokens))


class Normalized(nn.Embedding):
    """Embeddings with a part of their own, as Inkling's, and a buffer that no file has, as Gemma's."""

    def __init__(self) -> None:
        super().__init__(24, 32, padding_idx=23)
        self.embed_norm = nn.LayerNorm(32)
        self.register_buffer("embed_scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        looked_up: Tensor = self.embed_norm(super().forward(tokens)) * self.embed_scale.to(self.weight.dtype)
        return looked_up


def test_embeddings_with_a_part_of_their_own() -> None:
    """The part is loaded, saved, moved, copied and trained with the module, and stays when it becomes dense."""
    embedding, tokens = QuantizedEmbedding(stored(), Normalized()), torch.tensor([[0, 23], [5, 5]])
    assert {"embed_norm.weight", "embed_norm.bias"} <= embedding.state_dict().keys()
    assert "embed_scale" not in embedding.state_dict()
    with torch.no_grad():
        embedding.embed_norm.weight.copy_(torch.linspace(1, 2, 32))
    embedding.fill(lambda native: nn.init.constant_(native.embed_scale, 3.0))
    ordinary = Normalized()
    with torch.no_grad():
        ordinary.weight.copy_(embedding.matrix())
        ordinary.embed_norm.weight.copy_(embedding.embed_norm.weight)
        ordinary.embed_scale.fill_(3.0)
    expected = ordinary(tokens)
    torch.testing.assert_close(embedding(tokens), expected)
    for copied in (*copy.deepcopy(nn.ModuleList([embedding])), pickle.loads(pickle.dumps(embedding))):
        copied.double()
        assert copied.embed_scale.dtype == torch.float64
        torch.testing.assert_close(copied(tokens).float(), expected)
        assert embedding.embed_scale.dtype == torch.float32
    embedding(tokens).sum().backward()
    assert embedding.embed_norm.weight.grad is not None
    assert embedding.padding_idx == 23
    embedding.is_filled = True
    [turned] = copy.deepcopy(nn.ModuleList([embedding]))
    turned.become_dense(turned.matrix())
    for dense in (turned, copy.deepcopy(embedding), embedding.dense(embedding.matrix())):
        assert type(dense) is Normalized
        assert dense.state_dict().keys() == ordinary.state_dict().keys()
        assert dense.padding_idx == 23
        torch.testing.assert_close(dense(tokens), expected)


@torch.no_grad()
def test_a_compiled_embedding_with_a_part_of_its_own() -> None:
    torch._dynamo.reset()
    embedding, tokens = QuantizedEmbedding(stored(), Normalized()), torch.tensor([[0, 23], [5, 5]])
    compiled = torch.compile(embedding, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), embedding(tokens))
