"""`--load-format moetool` against a stub of vLLM's interfaces: what it alone can load, experts in several processes."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_stub
from families import build
from kinds import QWEN, _with, layout
from safetensors.torch import load_file
from served import Served, given, serving
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from moetool.architectures import ROLES, MoEShape
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.format.entry import format_entry
from moetool.format.layout import LayerLayout
from moetool.quiet import quiet
from moetool.runtime.loading import load_model
from moetool.serving.filling import served_layouts
from moetool.serving.vllm import register

INCLUDED = ("--method", "quantize", "--bits", 4, "--group-size", 16, "--include", "attention,embeddings:6")
GPT = MoEShape(6, 2, 32, 48, biases=ROLES)
GRANITE = MoEShape(4, 2, 32, 48)
FAMILIES: dict[str, tuple[dict[str, Any], list[LayerLayout]]] = {
    "qwen2_moe": (
        {"shared_expert_intermediate_size": 24, "mlp_only_layers": []},
        [
            layout(QWEN, "low-rank:3", "dense", channels=20, extended=True),
            layout(QWEN, "quantised:4:8", "low-rank:2", base="quantised-weight:4:8", extended=True),
            layout(QWEN, "shared-v:3", extended=True),
        ],
    ),
    "gpt_oss": (
        {"intermediate_size": 48, "num_local_experts": 6, "head_dim": 8, "sliding_window": 16},
        [
            layout(GPT, "low-rank:3", native=("down",)),
            layout(GPT, "quantised:4:8", base="low-rank:0"),
            layout(GPT, "low-rank:3", "dense", base="quantised-weight:4:8", native=("gate", "up")),
        ],
    ),
    "granitemoe": ({}, [layout(GRANITE, "low-rank:3"), layout(GRANITE, "nf4", native=("down",))]),
}


class Engine(nn.Module):
    """A model of vLLM with experts in some layers, which keeps what it is given to load beside them."""

    def __init__(self, *layers: Served) -> None:
        super().__init__()
        self.layers = nn.ModuleList(served.runner for served in layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.given = dict(weights)
        return set(self.given)

    def loaded(self, path: Path) -> "Engine":
        loader = vllm_stub.LOADERS["moetool"](SimpleNamespace(load_format="moetool"))
        loader.load_weights(self, SimpleNamespace(model=str(path), revision=None))
        for runner in self.layers:
            routed = runner.routed_experts
            routed.quant_method.process_weights_after_loading(routed)
        return self


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`random(family)`: a checkpoint of random compressed experts, in fp32."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            sizes, layouts = FAMILIES[family]
            made[family] = tmp_path_factory.mktemp("random") / family
            with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
                model = _with(build(family, **sizes), format_entry(dict(enumerate(layouts))))
                model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def included(run_cli: Any, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("included") / "out"
    result = run_cli("compress", tiny_mixtral, path, *INCLUDED)
    assert result.code == 0, result.stderr
    return path


def expected(path: Path, layer: int, tokens: int) -> Tensor:
    """What transformers' model gives for `given` tokens."""
    hidden, weights, chosen = given(tokens, experts_of(path))
    block = load_model(Checkpoint.open(path), torch.float32).model.layers[layer]
    experts = block.mlp.experts if hasattr(block, "mlp") else block.block_sparse_moe.experts
    with torch.no_grad():
        return experts(hidden, chosen.long(), weights)


def experts_of(path: Path) -> int:
    config = AutoConfig.from_pretrained(path)
    return getattr(config, "num_local_experts", None) or config.num_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_run_as_in_transformers(
    monkeypatch: pytest.MonkeyPatch, random: Callable[[str], Path], family: str
) -> None:
    path = random(family)
    for layer in range(len(FAMILIES[family][1])):
        served = serving(monkeypatch, path, layer, load_format="moetool")
        engine = Engine(served).loaded(path)
        for tokens in (1, 40):
            found = served.routed.forward_modular(*given(tokens, experts_of(path)))
            told = expected(path, layer, tokens)
            assert (found - told).norm() <= 1e-5 * told.norm()
        assert not [name for name in engine.given if ".experts." in name]


@pytest.mark.parametrize(
    "maps", [[[0, 1, 2, -1, -1, -1], [-1, -1, -1, 0, 1, 2]], [[-1, 0, -1, 1, -1, 2], [0, -1, 1, -1, 2, -1]]]
)
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_processes_give_what_one_would(
    monkeypatch: pytest.MonkeyPatch, random: Callable[[str], Path], family: str, maps: list[list[int]]
) -> None:
    """Each holds half of the experts; vLLM adds up what they give."""
    path = random(family)
    for layer in range(3):
        parts = {1: torch.zeros(1, 32), 40: torch.zeros(40, 32)}
        for numbers in maps:
            served = serving(
                monkeypatch, path, layer, load_format="moetool", num_local_experts=3, expert_map=torch.tensor(numbers)
            )
            Engine(served).loaded(path)
            assert {"2", "3"} & set(served.routed.moetool) == {"2"}
            for tokens in parts:
                parts[tokens] += served.routed.forward_modular(*given(tokens, 6))
        for tokens, found in parts.items():
            told = expected(path, layer, tokens)
            assert (found - told).norm() <= 1e-5 * told.norm()


def test_shared_experts_on_the_base_come_as_the_family_has_them(
    monkeypatch: pytest.MonkeyPatch, random: Callable[[str], Path]
) -> None:
    path = random("qwen2_moe")
    told = Engine(serving(monkeypatch, path, load_format="moetool")).loaded(path).given
    layers = load_model(Checkpoint.open(path), torch.float32).model.layers
    hidden = given(7)[0]
    for layer in range(3):
        gate, up, down = (told[f"model.layers.{layer}.mlp.shared_expert.{role}_proj.weight"] for role in ROLES)
        with torch.no_grad():
            shared = layers[layer].mlp.shared_expert(hidden)
        assert (F.linear(F.silu(hidden @ gate.T) * (hidden @ up.T), down) - shared).norm() <= 1e-5 * shared.norm()


@pytest.mark.parametrize(
    ("family", "says"),
    [("qwen2_moe", "shared expert on the base"), ("gpt_oss", "in one tensor"), ("granitemoe", "in one tensor")],
)
def test_other_loaders_are_refused(random: Callable[[str], Path], family: str, says: str) -> None:
    settings = Checkpoint.open(random(family)).settings
    with pytest.raises(UsageError, match=f"{says}.*: run vLLM with --load-format moetool"):
        served_layouts(settings)
    assert served_layouts(settings, decodes=True).keys() == set(range(len(FAMILIES[family][1])))


def test_weights_in_another_format_want_the_loader() -> None:
    entry = {"quant_method": "moetool", "format_version": 3, "layers": {}, "stored": {"quant_method": "fp8"}}
    config = {"model_type": "mixtral", "quantization_config": entry}
    with pytest.raises(UsageError, match="--load-format moetool"):
        served_layouts(config)
    assert served_layouts(config, decodes=True) == {}


def test_channels_skipped_in_every_batch_are_refused_where_others_would_skip_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shared expert that vLLM runs, and experts in other processes."""
    for extended, says in ((True, "skips channels of the base in every batch"), (False, "without expert parallelism")):
        sizes = FAMILIES["qwen2_moe"][0]
        dynamic = layout(QWEN, "low-rank:3", dynamic=5, extended=extended)
        with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
            model = _with(build("qwen2_moe", **sizes), format_entry({0: dynamic}))
            model.save_pretrained(path := tmp_path / says)
        with pytest.raises(UsageError, match=says):
            serving(
                monkeypatch, path, load_format="moetool", num_local_experts=3,
                expert_map=torch.tensor([0, 1, 2, -1, -1, -1]),
            )  # fmt: skip


def test_experts_in_several_processes_want_the_loader(
    monkeypatch: pytest.MonkeyPatch, random: Callable[[str], Path], included: Path
) -> None:
    monkeypatch.setattr("moetool.serving.filling.needs_decoding", lambda config: False)
    with pytest.raises(UsageError, match="every process reads its own experts: run vLLM with --load-format moetool"):
        serving(monkeypatch, included, num_local_experts=2, expert_map=torch.tensor([0, 1, -1, -1]))


def test_files_that_lack_a_tensor_are_refused(
    monkeypatch: pytest.MonkeyPatch, random: Callable[[str], Path], tmp_path: Path
) -> None:
    path = random("gpt_oss")
    served = serving(monkeypatch, path, load_format="moetool")
    with pytest.raises(InvalidInputError, match="tensors of layer 0 are missing"):
        served.routed.quant_method.process_weights_after_loading(served.routed)


def test_what_include_has_stored_is_decoded(monkeypatch: pytest.MonkeyPatch, included: Path) -> None:
    """Under the names and in the shapes that its source has; all else but experts passes through."""
    plain = load_model(Checkpoint.open(included), torch.float32)
    served = serving(monkeypatch, included, load_format="moetool")
    assert served.quantization.get_quant_method(vllm_stub.LinearBase(), "model.layers.0.self_attn.qkv_proj") is not None
    engine = Engine(served).loaded(included)
    files = {
        name: tensor for name, tensor in load_file(included / "model.safetensors").items() if ".experts." not in name
    }
    entry = AutoConfig.from_pretrained(included).to_dict()["quantization_config"]
    coded = {name.removesuffix("moetool.codes") for name in files if name.endswith("moetool.codes")}
    assert coded == {f"{module}." for module in entry["beside"]}
    assert len(coded) == 14
    assert engine.given.keys() == {
        name for name in files if not name.startswith(tuple(f"{own}moetool" for own in coded))
    }
    for name, tensor in engine.given.items():
        if (module := name.removesuffix("weight")) in coded:
            assert tensor.equal(plain.get_submodule(module[:-1]).decoded())
        else:
            assert tensor.equal(files[name])


def test_the_loader_names_what_it_needs(monkeypatch: pytest.MonkeyPatch, included: Path) -> None:
    with pytest.raises(UsageError, match="run vLLM with --load-format moetool"):
        served_layouts(Checkpoint.open(included).settings)
    vllm_stub.install(monkeypatch, AutoConfig.from_pretrained(included))
    register()
    told = SimpleNamespace(model="owner/name", revision="v2")
    with pytest.raises(UsageError, match="newest revision of owner/name"):
        vllm_stub.LOADERS["moetool"](SimpleNamespace()).download_model(told)
