"""Neurons into experts: the tensors of a moefied checkpoint, and what it costs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES, MOEFY_FAMILIES
from safetensors.torch import load_file
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor
from upcycled import open_dense, save_dense, write_made

import moetool  # noqa: F401  (makes transformers load its checkpoints)
from moetool.errors import UsageError
from moetool.format.kinds.moefied import MoefiedSpec, SelectorKind
from moetool.moefy import clusters
from moetool.moefy.clusters import (
    LayerPlan,
    Moefied,
    check_experts,
    chosen_experts,
    flops,
    order_by_activations,
    order_by_weights,
)
from moetool.quiet import quiet
from moetool.runtime.dense import DenseModel
from moetool.runtime.loading import model_class
from moetool.runtime.modules.insertion import is_placeholder
from moetool.runtime.modules.neuron_experts import NeuronExperts

EXPERTS, CONFIGS = 4, Path(__file__).parent.parent / "configs"


def moefied(dense: DenseModel, selector: SelectorKind = "mlp", keep: float = 0.5, **options: Any) -> Moefied:
    """Neurons backwards, with a centre and a selector of random numbers."""
    width, hidden = dense.intermediate, dense.hidden

    def plan(layer: int) -> LayerPlan:
        stream = torch.Generator().manual_seed(layer)
        return LayerPlan(
            torch.arange(width).flip(0),
            torch.randn(width, generator=stream),
            torch.randn(EXPERTS, hidden, generator=stream),
            torch.randn(EXPERTS, EXPERTS, generator=stream),
            torch.randperm(EXPERTS, generator=stream),
        )

    dtype, layers = options.pop("dtype", None), options.pop("layers", tuple(range(dense.layers)))
    spec = MoefiedSpec(**{"experts": EXPERTS, **options}, keep=keep, selector=selector, layers=layers)
    return Moefied(dense=dense, dtype=dtype, seed=0, spec=spec, layer_plan=plan)


def written(model: Moefied, path: Path) -> dict[str, Tensor]:
    """Every tensor, in a checkpoint of one file."""
    write_made(path, [made for _, unit in model.units() for made in unit], model.config())
    return load_file(path / "model.safetensors")


def loaded(path: Path) -> Any:
    with quiet():
        kind = model_class(json.loads((path / "config.json").read_text()))
        model, told = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


# -- which neurons are together


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "opt", "bert"])
@pytest.mark.parametrize("experts", [2, 8])
def test_an_order_holds_every_neuron_once(opened: Any, family: str, experts: int) -> None:
    dense = opened(family)
    order = order_by_weights(dense, 1, experts, 0)
    assert order.dtype == torch.int64
    assert order.sort().values.equal(torch.arange(dense.intermediate))
    assert order.equal(order_by_weights(dense, 1, experts, 0))
    assert not order.equal(order_by_weights(dense, 2, experts, 0))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "opt", "bert"])
def test_neurons_that_point_the_same_way_are_together(
    opened: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four directions, with lengths of their own that are no matter; of gated networks, gates alone do not tell."""
    dense = opened(family)
    members = torch.randperm(dense.intermediate, generator=torch.Generator().manual_seed(0)) % 4
    ways = torch.linalg.qr(torch.randn(dense.hidden, 4, generator=torch.Generator().manual_seed(1))).Q.T
    lengths = 1 + torch.arange(dense.intermediate)[:, None] % 7

    def matrix(_: DenseModel, layer: int, role: str) -> Tensor:
        if role == "gate":
            return lengths * ways[members // 2]
        return lengths * ways[members if "gate" not in dense.architecture.roles else 2 + members % 2]

    monkeypatch.setattr(DenseModel, "matrix", matrix)
    found = members[order_by_weights(dense, 0, 4, 0)].view(4, -1)
    assert (found == found[:, :1]).all()
    assert sorted(found[:, 0].tolist()) == [0, 1, 2, 3]


class Contributing:
    """Stands for a network whose neurons have given activations `[tokens, neurons]` and norms of what they write."""

    device = torch.device("cpu")

    def __init__(self, activations: Tensor, norms: Tensor) -> None:
        self.inputs, self._activations, self._norms = activations, activations, norms

    def activations(self, every: int = 1) -> Iterator[Tensor]:
        yield from self._activations[::every].split(100)

    def output_norms(self) -> Tensor:
        return self._norms


def planted(tokens: int = 700, groups: int = 4, each: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Activations, norms, centre and the group of every neuron. Each token needs one group of neurons, whose signs and
    norms are no matter."""
    stream = torch.Generator().manual_seed(0)
    members = torch.randperm(groups * each, generator=stream) % groups
    norms = 10 ** (3 * torch.rand(groups * each, generator=stream))
    needed = torch.randint(groups, (tokens, 1), generator=stream) == members
    signs = torch.randn(tokens, groups * each, generator=stream).sign()
    centre = 30 * torch.randn(groups * each, generator=stream)
    return centre + signs * (0.1 + 3.0 * needed) / norms, norms, centre, members


def test_neurons_that_matter_to_the_same_tokens_are_together() -> None:
    activations, norms, centre, members = planted()
    network: Any = Contributing(activations, norms)
    order = order_by_activations(network, centre, 1, 4, 0)
    assert order.sort().values.equal(torch.arange(len(members)))
    found = members[order].view(4, -1)
    assert (found == found[:, :1]).all()
    assert order.equal(order_by_activations(network, centre, 1, 4, 0))
    # Without the representative values, or without norms, these are no longer the groups.
    plain: Any = Contributing(activations, torch.ones_like(norms))
    for other, values in ((network, torch.zeros_like(centre)), (plain, centre)):
        mixed = members[order_by_activations(other, values, 1, 4, 0)].view(4, -1)
        assert not (mixed == mixed[:, :1]).all()


def test_neurons_are_told_apart_on_a_part_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every third token of 700 where 300 are taken at most: the others may be anything."""
    monkeypatch.setattr(clusters, "CLUSTERED_TOKENS", 300)
    activations, norms, centre, members = planted()
    spoilt = activations.clone()
    spoilt[1::3], spoilt[2::3] = torch.inf, torch.nan
    network: Any = Contributing(spoilt, norms)
    found = members[order_by_activations(network, centre, 1, 4, 0)].view(4, -1)
    assert (found == found[:, :1]).all()


# -- tensors


@pytest.mark.parametrize("family", sampled([*DENSE_FAMILIES, *MOEFY_FAMILIES], [*DENSE_STRUCTURES, *MOEFY_FAMILIES]))
def test_every_family_is_its_own_weights_in_another_order(opened: Any, tmp_path: Path, family: str) -> None:
    dense = opened(family)
    model = moefied(dense, layers=(0, 2))
    tensors = written(model, tmp_path / "out")
    for name in dense.ffn_names(1):
        assert tensors[name].equal(dense.checkpoint.read(name))
    network = loaded(tmp_path / "out").get_submodule(dense.architecture.ffn_prefix(2).removesuffix("."))
    assert isinstance(network, NeuronExperts)
    back = torch.arange(dense.intermediate).flip(0)
    for role in dense.architecture.roles:
        if role == "down":
            weight, bias = network.linear("down").weight[:, back], network.linear("down").bias
        else:
            weight, bias = network._neurons(role)
            weight, bias = weight[back], None if bias is None else bias[back]
        assert weight.equal(dense.matrix(2, role))
        assert (bias is not None) is (role in dense.biases)
        if bias is not None:
            whole = dense.bias(2, role)
            half = whole.chunk(2)[role == "up"] if dense.architecture.is_joined and role != "down" else whole
            assert bias.equal(half)
    plan = model.layer_plan(2)
    assert network.centre.equal(plan.centre)
    assert plan.first is not None
    assert network.selector.first.weight.equal(plan.first)
    assert network.selector.second.weight.equal(plan.second)


@pytest.mark.parametrize("selector", ["mlp", "oracle", "fixed"])
@pytest.mark.parametrize("family", ["llama-mlp-bias", "phi3", "gpt_neox", "falcon", "opt", "bert"])
def test_parameters_are_those_of_the_loaded_model(
    opened: Any, tmp_path: Path, family: str, selector: SelectorKind
) -> None:
    dense = opened(family)
    model = moefied(dense, selector, 0.25, layers=(1, 2))
    counts, tensors = model.parameters(), written(model, tmp_path / "out")
    stored = sum(tensor.numel() for tensor in tensors.values() if not is_placeholder(tensor))
    assert counts.total == stored
    assert counts.added == stored - dense.parameters
    networks = [m for m in loaded(tmp_path / "out").modules() if isinstance(m, NeuronExperts)]
    assert len(networks) == 2
    idle = 0
    for network in networks:
        neurons = (network.num_experts - network.kept) * network.size
        assert neurons == 3 * dense.intermediate // 4
        for role in dense.architecture.roles:
            idle += neurons * dense.hidden
            idle += neurons if role != "down" and role in dense.biases else 0
    assert counts.active == counts.total - idle


def test_all_in_one_dtype_but_the_centre(opened: Any, tmp_path: Path) -> None:
    half = open_dense(save_dense(tmp_path / "dense", "phi3", dtype=torch.bfloat16))
    for dtype, stored in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        tensors = written(moefied(half, dtype=dtype), tmp_path / str(dtype))
        assert {name.rpartition(".")[2] for name, t in tensors.items() if t.dtype != stored} <= {"centre"}
        assert all(t.dtype == torch.float32 for name, t in tensors.items() if name.endswith("centre"))


# -- numbers of experts


def test_a_share_of_the_experts() -> None:
    assert [chosen_experts(keep, 64) for keep in (0.35, 0.5, 0.75, 0.85, 1.0)] == [22, 32, 48, 54, 64]
    assert chosen_experts(0.13, 4) == 1
    with pytest.raises(UsageError, match=r"--keep 0\.1 of 4 experts.*0\.25"):
        chosen_experts(0.1, 4)


@pytest.mark.parametrize(
    ("experts", "neurons", "near"),
    [(64, 2820, "60"), (5, 48, "2, 3, 4, 6"), (100, 48, "12, 16, 24, 48"), (64, 11008, None), (4, 13, "13")],
)
def test_what_divides_the_neurons_is_named(experts: int, neurons: int, near: str | None) -> None:
    if near is None:
        check_experts(experts, neurons)
        return
    with pytest.raises(UsageError, match=rf"--experts {experts} .* {neurons} neurons.*{near}") as raised:
        check_experts(experts, neurons)
    named = [int(number) for number in str(raised.value).partition("Near it: ")[2].rstrip(".").split(", ")]
    assert all(neurons % number == 0 for number in named)
    check_experts(named[0], neurons)


# -- costs


def test_operations_of_a_whole_model(opened: Any) -> None:
    """Counted from the modules themselves: a token's products with weights, and with the keys and values of a text."""
    length = 50
    for family in ("llama", "falcon", "gpt_bigcode", "starcoder2", "bert", "opt"):
        dense = opened(family)
        prefix = dense.architecture.layer.partition("{layer}")[0]
        shapes = [info.shape for name, info in dense.checkpoint.tensors.items() if name.startswith(prefix)]
        weights = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
        whole = weights + dense.layers * 2 * length * dense.hidden
        network = len(dense.architecture.roles) * dense.hidden * dense.intermediate
        fixed = whole - dense.layers * network / 2
        assert flops(dense, dense.layers, 0.5, EXPERTS, length, "fixed") == pytest.approx(fixed / whole)
        chosen = fixed + dense.layers * EXPERTS * (dense.hidden + EXPERTS)
        assert flops(dense, dense.layers, 0.5, EXPERTS, length, "mlp") == pytest.approx(chosen / whole)
        oracle = fixed + dense.layers * (network - dense.hidden * dense.intermediate)
        assert flops(dense, dense.layers, 0.5, EXPERTS, length, "oracle") == pytest.approx(oracle / whole)
        assert flops(dense, 0, 0.5, EXPERTS, length, "mlp") == 1


def test_grouped_heads_of_large_falcons(tmp_path: Path) -> None:
    """Their config says `multi_query` too, and means eight groups."""
    large = {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": True}
    dense = open_dense(save_dense(tmp_path / "falcon", "falcon", **large))
    attention = dense.checkpoint.info("transformer.h.0.self_attention.query_key_value.weight").shape[0]
    whole = dense.hidden * (attention + dense.hidden) + 2 * 10 * dense.hidden + 2 * dense.hidden * dense.intermediate
    saved = dense.hidden * dense.intermediate
    assert flops(dense, dense.layers, 0.5, EXPERTS, 10, "fixed") == pytest.approx(1 - saved / whole)


@pytest.fixture
def planned(run_cli: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`planned("phi-2", *options)`: the dry run of a real model, from its config alone."""

    def plan(name: str, *options: object) -> dict[str, Any]:
        source = tmp_path / name
        source.mkdir(exist_ok=True)
        (source / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
        result = run_cli("moefy", source, tmp_path / "out", *options, "--dry-run", "--json")
        assert result.code == 0, result.stderr
        assert result.json["headers"] == "config.json alone"
        return result.json

    return plan


@pytest.mark.parametrize(("keep", "published"), [(0.35, 58), (0.5, 68), (0.75, 85)])
@pytest.mark.parametrize("method", ["g-moefication", "moefication"])
def test_operations_of_table_1(planned: Any, keep: float, published: int, method: str) -> None:
    plan = planned("mbert", "--experts", 64, "--keep", keep, "--method", method)
    attention, network, selector = 4 * 768**2 + 2 * 128 * 768, 2 * 768 * 3072, 64 * (768 + 64)
    share = (attention + plan["experts_per_token"] / 64 * network + selector) / (attention + network)
    assert plan["flops"] == f"{share:.1%} of dense, reading 128 tokens"
    assert round(100 * share) == published


@pytest.mark.parametrize(
    ("name", "experts", "method", "published", "parameters"),
    [
        ("phi-2", 64, "moefication", 0.0019, 2_779_683_840),
        ("phi-2", 64, "g-moefication", 0.0021, 2_779_683_840),
        ("falcon-7b", 128, "moefication", 0.0028, 6_921_720_704),
        ("falcon-7b", 128, "g-moefication", 0.0029, 6_921_720_704),
    ],
)
def test_added_parameters_of_table_2(
    planned: Any, name: str, experts: int, method: str, published: float, parameters: int
) -> None:
    """SantaCoder's .0038 and .0041 are not those of 64 experts, nor of 128."""
    plan = planned(name, "--experts", experts, "--method", method, "--keep", 0.85)
    assert plan["parameters"] - plan["added_parameters"] == parameters
    assert plan["added_as_published"] == f"{published:.4f} of dense"


def test_selectors_that_are_no_network_add_next_to_nothing(planned: Any) -> None:
    for options in (("--selector", "random"), ("--selector", "oracle"), ("--baseline", "snip")):
        assert planned("phi-2", *options)["added_as_published"] == "0.0001 of dense"
        assert planned("phi-2", "--method", "moefication", *options)["added_as_published"] == "0.0000 of dense"


def test_the_way_back_needs_few_boundaries_on_disk(planned: Any) -> None:
    forward, back = (planned("phi-2", *options)["scratch_bytes"] for options in ((), ("--baseline", "snip")))
    sample = 32768 * 2560 * 4
    assert forward == 2 * 128 * 512 * 2560 * 2 + sample
    # Every sixth, five between, and gradients on either side.
    assert back == (5 + 5 + 2) * 128 * 512 * 2560 * 2 + sample


def test_memory_does_not_grow_with_all_activations(planned: Any) -> None:
    """Those of all sampled tokens at once would be 1.3 GB."""
    few, many = (planned("phi-2", "--selector-tokens", tokens)["peak_memory_bytes"] for tokens in (4096, 32768))
    assert many - few == 4 * (32768 - 4096) * 3 * 2560
    clustered = [
        planned("phi-2", "--experts", 64, "--selector-tokens", tokens)["peak_memory_bytes"] for tokens in (4096, 32768)
    ]
    assert clustered[1] - clustered[0] == 4 * (32768 - 4096) * (3 * 2560 + 2 * 64)
