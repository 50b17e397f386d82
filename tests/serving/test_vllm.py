"""The vLLM plug-in against a stub of vLLM's interfaces: what registers, what is loaded, what `apply` gives."""

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_stub
from families import build
from safetensors.torch import load_file
from stored_experts import model_of
from torch import Tensor
from transformers import AutoConfig
from vllm_stub import FusedMoEConfig, MoERunner, RoutedExperts, load_by_modules, load_by_paths

from moetool.architectures import Role
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.format.entry import format_entry
from moetool.format.families import architecture_of
from moetool.runtime.loading import load_model
from moetool.serving.filling import layer_of, served_layouts
from moetool.serving.vllm import register

METHODS: dict[str, tuple[object, ...]] = {
    "d2moe": ("--ratio", 0.35, "--prune-base", 0.2),
    "hybrid": ("--ratio", 0.55, "--group-size", 16, "--base-bits", "nf4"),
    "quantize": ("--bits", 3, "--group-size", 16, "--rotate"),
}
INCLUDED = ("--method", "quantize", "--bits", 4, "--group-size", 16, "--include", "attention,embeddings")
REFUSED = {"shared-expert-on-base": "shared expert on the base", "masks": "modules that only moetool runs"}
SHARDS: tuple[Role, ...] = ("gate", "down", "up")  # w1, w2 and w3


@pytest.fixture(scope="module")
def compressed(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 8, "--sequence-length", 32)

    def make(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp("served") / method
            options = INCLUDED if method == "included" else ("--method", method, *METHODS[method])
            result = run_cli("compress", tiny_mixtral, made[method], *options, *text)
            assert result.code == 0, result.stderr
        return made[method]

    return make


class Served:
    """The experts of a checkpoint's layer as vLLM builds them, not yet loaded."""

    def __init__(self, path: Path, layer: int = 0, **moe: int) -> None:
        register()
        config = Checkpoint.open(path).config
        architecture = architecture_of(config)
        kind = sys.modules["vllm.model_executor.layers.quantization"].get_quantization_config("moetool")
        self.quantization = kind.from_config(config["quantization_config"])
        shape = architecture.shape
        sizes = {
            "num_experts": shape.experts,
            "num_local_experts": shape.experts,
            "hidden_dim": shape.hidden,
            "intermediate_size_per_partition": shape.intermediate,
        }
        self.prefix, self.weights = architecture.experts_prefix(layer), dict(load_file(path / "model.safetensors"))
        self.names = [architecture.weights[role].split(".")[2] for role in SHARDS]
        self.routed = RoutedExperts(
            self.prefix[:-1], torch.float32, FusedMoEConfig(**{**sizes, **moe}), self.quantization
        )
        self.runner = MoERunner(self.routed)

    def load(self, way: str = "modules") -> None:
        if way == "modules":
            loaded = load_by_modules(self.runner, self.prefix, self.weights.items())
            assert loaded == {name.removeprefix(self.prefix) for name in self.weights if name.startswith(self.prefix)}
        else:
            mapper = self.quantization.get_cache_scale_mapper()
            load_by_paths(self.runner, self.prefix, self.weights.items(), mapper, self.names)
        self.routed.quant_method.process_weights_after_loading(self.routed)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    def make(path: Path, *, enforce_eager: bool = True, **options: int) -> Served:
        vllm_stub.install(monkeypatch, AutoConfig.from_pretrained(path), enforce_eager=enforce_eager)
        return Served(path, **options)

    return make


def given(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and experts of some tokens, as vLLM's routers give them."""
    draw = torch.Generator().manual_seed(tokens)
    hidden, scores = torch.randn(tokens, 32, generator=draw), torch.randn(tokens, 4, generator=draw)
    weights, chosen = scores.softmax(1).topk(2)
    return hidden, weights, chosen.int()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["modules", "paths"])
def test_layers_run_as_in_transformers(
    serve: Callable[..., Served], compressed: Callable[[str], Path], method: str, way: str
) -> None:
    path = compressed(method)
    model = load_model(Checkpoint.open(path), torch.float32)
    for layer in range(2):
        served = serve(path, layer=layer)
        served.load(way)
        experts = model.model.layers[layer].mlp.experts
        for tokens in (1, 40):
            hidden, weights, chosen = given(tokens)
            with torch.no_grad():
                expected = experts(hidden, chosen.long(), weights)
            found = served.routed.forward_modular(hidden, weights, chosen)
            assert found.shape == hidden.shape
            assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_families_have_names_of_their_own(
    serve: Callable[..., Served], run_cli: Any, save_model: Any, tmp_path: Path
) -> None:
    source, path = save_model(build("qwen3_moe"), tmp_path / "model"), tmp_path / "out"
    assert run_cli("compress", source, path, "--method", "quantize", "--bits", 4, "--group-size", 8).code == 0
    model = load_model(Checkpoint.open(path), torch.float32)
    layer = int(max(Checkpoint.open(path).config["quantization_config"]["layers"]))
    for way in ("modules", "paths"):
        served = serve(path, layer=layer)
        served.load(way)
        hidden, weights, chosen = given(5)
        with torch.no_grad():
            expected = model.model.layers[layer].mlp.experts(hidden, chosen.long(), weights)
        assert (served.routed.forward_modular(hidden, weights, chosen) - expected).norm() <= 1e-5 * expected.norm()


def test_every_tensor_has_its_place(serve: Callable[..., Served], compressed: Callable[[str], Path]) -> None:
    for method in METHODS:
        served = serve(compressed(method))
        inside = {name for name in served.weights if name.startswith(served.prefix)}
        served.load()
        dropped = sorted(inside)[len(inside) // 2]
        again = serve(compressed(method))
        del again.weights[dropped]
        with pytest.raises(InvalidInputError, match="1 tensors of layer 0 are missing"):
            again.load()


def test_what_is_too_much_or_does_not_fit_is_refused(
    serve: Callable[..., Served], compressed: Callable[[str], Path]
) -> None:
    served = serve(compressed("quantize"))
    served.weights[f"{served.prefix}moetool.0.gate.u"] = torch.zeros(2, 2)
    with pytest.raises(InvalidInputError, match=r"moetool\.0\.gate\.u is in the checkpoint"):
        served.load()
    served = serve(compressed("quantize"))
    served.weights[f"{served.prefix}1.w1.weight"] = torch.zeros(48, 32)
    with pytest.raises(InvalidInputError, match="under its family's name"):
        served.load("paths")
    served = serve(compressed("quantize"))
    name = f"{served.prefix}moetool.0.gate.scales"
    served.weights[name] = served.weights[name][:5]
    with pytest.raises(InvalidInputError, match=r"is torch.float32 \[5, 2\], and must be torch.float32 \[48, 2\]"):
        served.load()


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        ({"intermediate_size_per_partition": 24}, "24 of 48 channels"),
        ({"num_local_experts": 2}, "2 of 4 experts"),
    ],
)
def test_experts_are_not_cut_up(
    serve: Callable[..., Served], compressed: Callable[[str], Path], cut: dict[str, int], says: str
) -> None:
    with pytest.raises(UsageError, match=f"{says}: run vLLM with --tensor-parallel-size 1"):
        serve(compressed("quantize"), **cut)


def test_graphs_on_a_card_are_refused(serve: Callable[..., Served], compressed: Callable[[str], Path]) -> None:
    assert serve(compressed("quantize"), enforce_eager=False)
    with torch.device("meta"), pytest.raises(UsageError, match="--enforce-eager"):
        serve(compressed("quantize"), enforce_eager=False)


def test_all_else_is_vllms(serve: Callable[..., Served], compressed: Callable[[str], Path]) -> None:
    quantization = serve(compressed("quantize")).quantization
    assert isinstance(
        quantization.get_quant_method(vllm_stub.LinearBase(), "lm_head"), vllm_stub.UnquantizedLinearMethod
    )
    assert quantization.get_quant_method(torch.nn.Embedding(1, 1), "model.embed_tokens") is None
    assert not [name for name, own in serve(compressed("hybrid")).routed.named_parameters() if own.requires_grad]


def test_layers_that_are_stored_natively_are_vllms(
    serve: Callable[..., Served], compressed: Callable[[str], Path]
) -> None:
    served = serve(compressed("quantize"))
    served.quantization._entry["layers"] = {"1": served.quantization._entry["layers"]["1"]}
    vars(served.quantization).pop("_layouts", None)
    vars(served.quantization).pop("_checkpoint", None)
    for layer, is_ours in ((0, False), (1, True)):
        method = served.quantization.get_quant_method(served.routed, f"model.layers.{layer}.block_sparse_moe.experts")
        assert (method is not None) == is_ours


def test_registering_twice_is_registering_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch, None)
    register()
    register()
    assert vllm_stub.QUANTIZATION_METHODS.count("moetool") == 1
    config = vllm_stub.get_quantization_config("moetool")
    assert config.get_min_capability() == 80
    with pytest.raises(InvalidInputError, match="format version 999"):
        config.from_config({"quant_method": "moetool", "format_version": 999})


def test_the_entry_point_is_there_and_costs_nothing() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["moetool"].partition(":")
    assert getattr(import_module(module), name) is register
    code = f"import sys, {module}; print({{'torch', 'transformers', 'vllm'}} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


@pytest.mark.parametrize(("kind", "says"), REFUSED.items())
def test_what_is_more_than_routed_experts_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, says: str
) -> None:
    """Before any layer is built, a linear one too."""
    config = model_of(kind).config
    vllm_stub.install(monkeypatch, config)
    register()
    entry = config.to_dict()["quantization_config"]
    quantization = vllm_stub.get_quantization_config("moetool").from_config(entry)
    with pytest.raises(UsageError, match=says):
        quantization.get_quant_method(vllm_stub.LinearBase(), "model.layers.0.self_attn.qkv_proj")


def test_weights_in_another_format_are_refused() -> None:
    entry = {"quant_method": "moetool", "format_version": 3, "layers": {}, "stored": {"quant_method": "fp8"}}
    config = {"model_type": "mixtral", "quantization_config": entry}
    with pytest.raises(UsageError, match="--load-format moetool"):
        served_layouts(config)
    assert served_layouts(config, decodes=True) == {}


class _Engine(torch.nn.Module):
    """A model that keeps what it is given to load."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.given = dict(weights)
        return set(self.given)


def test_the_loader_decodes_what_include_has_stored(
    monkeypatch: pytest.MonkeyPatch, compressed: Callable[[str], Path]
) -> None:
    """Under the names and in the shapes that its source has; experts and all else pass through."""
    path = compressed("included")
    plain = load_model(Checkpoint.open(path), torch.float32)
    config = AutoConfig.from_pretrained(path)
    vllm_stub.install(monkeypatch, config, load_format="moetool")
    register()
    entry = config.to_dict()["quantization_config"]
    quantization = vllm_stub.get_quantization_config("moetool").from_config(entry)
    assert quantization.get_quant_method(vllm_stub.LinearBase(), "model.layers.0.self_attn.qkv_proj") is not None
    engine = _Engine()
    told = SimpleNamespace(model=str(path), revision=None)
    vllm_stub.LOADERS["moetool"](SimpleNamespace(load_format="moetool")).load_weights(engine, told)
    files = load_file(path / "model.safetensors")
    coded = {name.removesuffix("moetool.codes") for name in files if name.endswith("moetool.codes")} & {
        f"{module}." for module in entry["beside"]
    }
    assert len(coded) == 14
    assert engine.given.keys() == {
        name for name in files if not name.startswith(tuple(f"{own}moetool" for own in coded))
    }
    for name, tensor in engine.given.items():
        if (module := name.removesuffix("weight")) in coded:
            assert tensor.equal(plain.get_submodule(module[:-1]).decoded())
        else:
            assert tensor.equal(files[name])


def test_the_loader_names_what_it_needs(monkeypatch: pytest.MonkeyPatch, compressed: Callable[[str], Path]) -> None:
    path = compressed("included")
    with pytest.raises(UsageError, match="run vLLM with --load-format moetool"):
        served_layouts(Checkpoint.open(path).settings)
    vllm_stub.install(monkeypatch, AutoConfig.from_pretrained(path))
    register()
    told = SimpleNamespace(model="owner/name", revision="v2")
    with pytest.raises(UsageError, match="newest revision of owner/name"):
        vllm_stub.LOADERS["moetool"](SimpleNamespace()).download_model(told)


def test_families_that_vllm_names_otherwise_are_refused() -> None:
    config = build("granitemoe").config.to_dict()
    with pytest.raises(UsageError, match="in one tensor"):
        served_layouts({**config, "quantization_config": format_entry({})})


def test_layers_have_numbers() -> None:
    assert layer_of("language_model.model.layers.31.mlp.experts") == 31
    with pytest.raises(InvalidInputError, match="which layer"):
        layer_of("model.experts")
