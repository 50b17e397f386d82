"""The vLLM plug-in against a stub of vLLM's interfaces: what registers, what is loaded, what `apply` gives."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stub
from families import build
from served import Served, given, serving
from stored_experts import model_of

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.runtime.loading import load_model
from moetool.serving.filling import layer_of
from moetool.serving.vllm import register

METHODS: dict[str, tuple[object, ...]] = {
    "d2moe": ("--ratio", 0.35, "--prune-base", 0.2),
    "hybrid": ("--ratio", 0.55, "--group-size", 16, "--base-bits", "nf4"),
    "quantize": ("--bits", 3, "--group-size", 16, "--rotate"),
}
REFUSED = {"shared-expert-on-base": "shared expert on the base.*--load-format moetool", "masks": "only moetool runs"}


@pytest.fixture(scope="module")
def compressed(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 8, "--sequence-length", 32)

    def make(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp("served") / method
            result = run_cli("compress", tiny_mixtral, made[method], "--method", method, *METHODS[method], *text)
            assert result.code == 0, result.stderr
        return made[method]

    return make


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    return partial(serving, monkeypatch)


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
    with pytest.raises(UsageError, match=f"{says}: with .*--enable-expert-parallel"):
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


def test_layers_have_numbers() -> None:
    assert layer_of("language_model.model.layers.31.mlp.experts") == 31
    with pytest.raises(InvalidInputError, match="which layer"):
        layer_of("model.experts")
