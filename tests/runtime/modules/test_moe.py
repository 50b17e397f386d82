"""MoE layers of a family's own feed-forward networks: the maths of routing, and life inside transformers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dense_families import build_dense
from kinds import WITHOUT_MOETOOL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel
from upcycled import fill_expert, load, logits, open_dense, prompt, relative_error, save_dense, upcycled, write_upcycled

from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.format.kinds.moe import MoESpec
from moetool.quiet import quiet
from moetool.runtime.modules.moe import CustomMoELayer
from moetool.upcycle.experts import PartlyRedrawn

HIDDEN, EXPERTS, TOP_K = 32, 5, 2
FAMILIES = ["llama", "llama-mlp-bias", "phi3", "gpt_neox", "gpt_bigcode", "falcon"]
SHARED = ["none", "half", "xft", "med"]


def dense_ffn(family: str) -> tuple[nn.Module, DenseArchitecture]:
    model = build_dense(family)
    architecture = find_dense_architecture(model.config.to_dict())
    return model.get_submodule(architecture.ffn_prefix(1).removesuffix(".")).double(), architecture


def custom_layer(family: str, shared: str, *, alike: bool) -> tuple[CustomMoELayer, nn.Module]:
    """An MoE layer in fp64 with a random router, its experts copies of the dense network or not, and that network."""
    ffn, architecture = dense_ffn(family)
    width = width_of(ffn, architecture)
    spec = spec_of(ffn, architecture, experts=EXPERTS, top_k=TOP_K, intermediate=width, shared=shared)
    layer = CustomMoELayer(ffn, architecture, spec).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=draw) / HIDDEN**0.5)
        for index in range(EXPERTS):
            fill_expert(layer.experts, index, ffn, architecture)
        for parameter in [] if alike else layer.experts.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
        if shared != "none":
            layer.shared_expert.load_state_dict(ffn.state_dict())
    return layer, ffn


def spec_of(ffn: nn.Module, architecture: DenseArchitecture, shared: str = "none", **shape: int) -> MoESpec:
    """A spec with the matrices and biases of a network, for one layer."""
    names = {name for name, _ in ffn.named_parameters()}
    biases = [role for role, name in architecture.weights.items() if name.removesuffix("weight") + "bias" in names]
    rest = {"layers": [1], "of": 3, "hidden": HIDDEN, "roles": architecture.roles, "biases": biases}
    return MoESpec.from_config({**shape, **rest, "shared": shared})


def width_of(ffn: nn.Module, architecture: DenseArchitecture) -> int:
    return int(ffn.get_submodule(architecture.weights["down"].removesuffix(".weight")).weight.shape[1])


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("shared", ["none", "half", "xft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_are_the_network(family: str, shared: str) -> None:
    layer, ffn = custom_layer(family, shared, alike=True)
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs(2, 7)), ffn(inputs(2, 7)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_med_adds_the_network_to_what_routing_gives(family: str) -> None:
    """(1 + Σp)·FFN."""
    layer, ffn = custom_layer(family, "med", alike=True)
    with torch.no_grad():
        mass = (inputs(2, 7) @ layer.gate.weight.T).softmax(-1).topk(TOP_K).values.sum(-1, keepdim=True)
        assert mass.max() < 0.999
        torch.testing.assert_close(layer(inputs(2, 7)), (1 + mass) * ffn(inputs(2, 7)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_different_experts_token_by_token(family: str, shared: str) -> None:
    layer, ffn = custom_layer(family, shared, alike=False)
    rows = inputs(40)
    expected = []
    with torch.no_grad():
        for row in rows:
            p = torch.softmax(layer.gate.weight @ row, 0)
            best = sorted(range(EXPERTS), key=lambda e: -p[e])[:TOP_K]
            top = p[best]
            weights = {
                "none": top / top.sum(),
                "half": top / top.sum() / 2,
                "med": top,
                "xft": torch.softmax(top, 0) * top[0],
            }[shared]
            beside = {"none": 0.0, "half": 0.5, "med": 1.0, "xft": 1 - top[0]}[shared]
            routed = layer.experts(row[None], torch.tensor([best]), weights[None])[0]
            expected.append(routed + beside * ffn(row[None])[0])
        torch.testing.assert_close(layer(rows), torch.stack(expected), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(layer(rows), ffn(rows), rtol=1e-3)


@pytest.mark.parametrize("shared", SHARED)
def test_weights_sum_to_what_is_left_for_the_experts(shared: str) -> None:
    layer, _ = custom_layer("llama", shared, alike=True)
    with torch.no_grad():
        chosen, weights, largest = layer.route(inputs(50))
        p = (inputs(50) @ layer.gate.weight.T).softmax(-1)
    assert chosen.equal(p.topk(TOP_K).indices)
    torch.testing.assert_close(largest[:, 0].double(), p.max(-1).values, rtol=1e-6, atol=0)
    sums = {"none": 1.0, "half": 0.5, "xft": p.max(-1).values, "med": p.topk(TOP_K).values.sum(-1)}[shared]
    torch.testing.assert_close(weights.double().sum(-1), torch.as_tensor(sums).double().expand(50), rtol=1e-6, atol=0)


def test_the_shape_of_the_input_is_kept() -> None:
    layer, _ = custom_layer("llama", "half", alike=False)
    with torch.no_grad():
        rows = layer(inputs(6))
        assert layer(inputs(6).view(2, 3, HIDDEN)).equal(rows.view(2, 3, HIDDEN))
        assert layer(inputs(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_routes_in_fp32(dtype: torch.dtype) -> None:
    layer, ffn = custom_layer("llama", "none", alike=True)
    layer, ffn = layer.to(dtype), ffn.to(dtype)
    with torch.no_grad():
        found = layer(inputs(6).to(dtype))
        assert found.dtype == dtype
        assert layer.route(inputs(6).to(dtype))[1].dtype == torch.float32
        assert relative_error(found.float(), ffn(inputs(6).to(dtype)).float()) < 0.01


def test_pieces_of_two_copies_are_never_mixed_in_16_bits() -> None:
    """Of 8 copies in 4 pieces each, 8 of 32 experts per token: in bfloat16 logits of two copies are often equal."""
    copies, pieces = 8, 4
    ffn, architecture = dense_ffn("llama")
    spec = spec_of(ffn, architecture, experts=copies * pieces, top_k=2 * pieces, intermediate=8)
    layer = CustomMoELayer(ffn, architecture, spec).bfloat16()
    rows = torch.randn(4096, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        router = torch.randn(copies, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5
        layer.gate.weight.copy_(router.repeat_interleave(pieces, 0))
        chosen, _, _ = layer.route(rows)
    ranked = (rows @ router.bfloat16().T).sort(dim=-1, descending=True).values
    assert (ranked[:, 1] == ranked[:, 2]).sum() > 5
    of_each = torch.zeros(len(rows), copies).scatter_add_(1, chosen // pieces, torch.ones(chosen.shape))
    assert of_each.unique().tolist() == [0, pieces]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_may_be_narrower_and_the_placeholder_is_one_number(family: str) -> None:
    ffn, architecture = dense_ffn(family)
    spec = spec_of(ffn, architecture, experts=3, top_k=1, intermediate=16, shared="half")
    layer = CustomMoELayer(ffn, architecture, spec)
    whole = {name: tuple(parameter.shape) for name, parameter in ffn.named_parameters()}
    found = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    first = "gate_up_proj" if "gate" in architecture.roles else "up_proj"
    rows = 16 * (len(architecture.roles) - 1)
    expected = {f"experts.{first}": (3, rows, HIDDEN), "experts.down_proj": (3, HIDDEN, 16), "gate.weight": (3, HIDDEN)}
    if spec.biases:
        expected |= {f"experts.{first}_bias": (3, rows), "experts.down_proj_bias": (3, HIDDEN)}
    expected |= {f"shared_expert.{name}": shape for name, shape in whole.items()}
    assert dict(layer.named_buffers())[architecture.weights["up"]].shape == (1, 1)
    assert found == expected
    assert all(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("shared", SHARED)
def test_gradients_reach_router_and_experts(shared: str) -> None:
    layer, _ = custom_layer("llama", shared, alike=False)
    layer(inputs(60)).square().sum().backward()
    assert layer.gate.weight.grad is not None
    assert (layer.gate.weight.grad.abs().sum(1) > 0).all()
    for name, parameter in layer.named_parameters():
        if name.startswith(("experts.", "shared_expert.")):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("shared", SHARED)
def test_the_routers_gradient_is_the_derivative(shared: str) -> None:
    """By central differences along one direction."""
    layer, _ = custom_layer("llama", shared, alike=False)
    draw = torch.Generator().manual_seed(3)
    direction = torch.randn(EXPERTS, HIDDEN, generator=draw, dtype=torch.float64)
    against = torch.randn(5, HIDDEN, generator=draw, dtype=torch.float64)
    (layer(inputs(5)) * against).sum().backward()
    assert layer.gate.weight.grad is not None
    slope = (layer.gate.weight.grad * direction).sum().item()
    values = []
    for step in (1e-3, -2e-3):  # forth, then back past the middle
        with torch.no_grad():
            layer.gate.weight.add_(step * direction)
            values.append((layer(inputs(5)) * against).sum().item())
    assert abs(slope) > 0.01
    assert slope == pytest.approx((values[0] - values[1]) / 2e-3, rel=0.01)


# In transformers.

OWN = ["phi", "llama-mlp-bias", "phi3", "gpt_bigcode"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """MoE layers of different experts beside a shared one, in the first and the last layer."""
    directory = tmp_path_factory.mktemp("custom")
    found = {}
    for family in OWN:
        dense = open_dense(save_dense(directory / f"{family}-dense", family))
        model = upcycled(dense, "moetool", experts=PartlyRedrawn(dense, 0.5, 0), shared="half", layers=(0, 2))
        found[family] = write_upcycled(directory / family, model)
    return found


@pytest.mark.parametrize("family", OWN)
def test_loading_inserts_moe_layers_with_the_weights_of_the_file(family: str, saved: dict[str, Path]) -> None:
    model = load(saved[family])
    architecture = find_dense_architecture(model.config.to_dict() | {"quantization_config": None})
    ffns = [model.get_submodule(architecture.ffn_prefix(layer).removesuffix(".")) for layer in range(3)]
    assert [isinstance(ffn, CustomMoELayer) for ffn in ffns] == [True, False, True]
    stored = load_file(saved[family] / "model.safetensors")
    state = model.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in stored.items())
    downs = ffns[0].experts.down_proj
    assert not downs[0].equal(downs[1])


@pytest.mark.parametrize("family", OWN)
def test_saving_gives_back_the_same_checkpoint(family: str, saved: dict[str, Path], tmp_path: Path) -> None:
    model = load(saved[family])
    with quiet():
        model.save_pretrained(tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (saved[family], tmp_path))
    assert after.keys() == before.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    entries = [
        json.loads((path / "config.json").read_text())["quantization_config"] for path in (saved[family], tmp_path)
    ]
    assert entries[1] == entries[0]
    assert logits(load(tmp_path)).equal(logits(model))


def test_it_generates(saved: dict[str, Path]) -> None:
    """Greedily, with a cache, what the logits without one say."""
    model = load(saved["phi"])
    tokens = prompt(2, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert found.shape == (2, 11)
    assert found[:, 6:].equal(logits(model, found)[:, 5:-1].argmax(-1))


def test_a_training_step_changes_router_and_experts(saved: dict[str, Path]) -> None:
    model = load(saved["phi"]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = ("gate.weight", "experts.up_proj", "experts.down_proj_bias", "shared_expert.fc1.weight")
    before = {name: model.model.layers[2].mlp.get_parameter(name).detach().clone() for name in names}
    first = model(input_ids=prompt(), labels=prompt()).loss
    first.backward()
    optimizer.step()
    assert model(input_ids=prompt(), labels=prompt()).loss.item() < first.item() - 1e-3
    for name, tensor in before.items():
        assert not model.model.layers[2].mlp.get_parameter(name).equal(tensor), name


def test_the_bare_decoder(saved: dict[str, Path]) -> None:
    decoder, whole = load(saved["phi"], AutoModel), load(saved["phi"])
    assert isinstance(decoder.layers[0].mlp, CustomMoELayer)
    with torch.no_grad():
        found, expected = (model(input_ids=prompt()).last_hidden_state for model in (decoder, whole.model))
    assert found.equal(expected)


def test_another_dtype(saved: dict[str, Path]) -> None:
    model = load(saved["llama-mlp-bias"], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert relative_error(logits(model), logits(load(saved["llama-mlp-bias"]))) < 0.1


@pytest.mark.parametrize("name", ["gate.weight", "experts.down_proj_bias", "shared_expert.fc1.weight"])
def test_a_missing_tensor_is_named(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    stored = load_file(saved["phi"] / "model.safetensors")
    del stored[f"model.layers.2.mlp.{name}"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((saved["phi"] / "config.json").read_bytes())
    with pytest.raises(RuntimeError, match=rf"missing from the checkpoint.*layers\.2\.mlp\.{name}"):
        load(tmp_path)


# Without moetool transformers must not fill the networks at random. The process runs while other tests go on.


@pytest.fixture(scope="module", autouse=True)
def process(saved: dict[str, Path]) -> Iterator[subprocess.Popen[str]]:
    paths = [*map(str, saved.values()), str(saved["phi"].parent / "phi-dense")]
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-c", WITHOUT_MOETOOL, *paths], stdout=pipe, stderr=pipe, text=True)
    yield started
    started.kill()
    started.communicate()


def test_without_moetool_loading_fails(process: subprocess.Popen[str]) -> None:
    """The dense model, which the last path is, loads there."""
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.splitlines() == ["refused"] * len(OWN) + ["loaded"]
