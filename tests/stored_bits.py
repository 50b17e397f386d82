"""Tiny checkpoints in the formats of other tools, as those write them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError

FILE, CONFIG = "model.safetensors", "config.json"
LEFT = ("embed_tokens", "lm_head", ".gate.weight", "shared_expert_gate", "norm")  # what makers of FP8 leave in 16 bits


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], entry: dict[str, Any]) -> Path:
    """A copy of a checkpoint in one file with other tensors and a `quantization_config`."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name != FILE:
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps({**config, "quantization_config": entry}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / FILE, {"format": "pt"})
    return target


def is_quantized(name: str) -> bool:
    return name.endswith(".weight") and not any(left in name for left in LEFT)


def save_fp8(source: Path, target: Path, block: tuple[int, int] | None = (8, 8), scale_fmt: str = "float") -> Path:
    """A model in transformers' FP8: matrices that blocks do not divide stay as they are."""
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))  # type: ignore[no-untyped-call]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        if is_quantized(name):
            tensors |= quantize.convert({name: tensor})
        else:
            tensors[name] = tensor
    entry = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": ["lm_head", "gate"],
        **({} if scale_fmt == "float" else {"scale_fmt": scale_fmt}),
    }
    return rewrite(source, target, tensors, entry)


def save_mxfp4(source: Path, target: Path) -> Path:
    """A gpt-oss as the hub has it: experts in groups of 32 e2m1 codes, here any, that share an exponent."""
    generator, tensors = torch.Generator().manual_seed(7), dict[str, Tensor]()
    for name, tensor in load_file(source / FILE).items():
        if tensor.ndim < 3:
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(122, 125, shape, dtype=torch.uint8, generator=generator)
    return rewrite(source, target, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def dequantized(path: Path, **options: Any) -> dict[str, Tensor]:
    """What transformers makes of a checkpoint when it dequantizes it, under the names on disk."""
    from transformers.core_model_loading import revert_weight_conversion

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)
    model.__dict__.pop("_weight_conversions", None)  # what it was read with begins with decoding
    return revert_weight_conversion(model, model.state_dict())


def config_entry(path: Path) -> dict[str, Any]:
    """`quantization_config` of a checkpoint."""
    return json.loads((path / CONFIG).read_text())["quantization_config"]


def check_refused(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object], says: str) -> None:
    """A checkpoint whose tensors were changed is not opened, and the error says why."""
    held = load_file(source / FILE)
    change(held)
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(rewrite(source, target, held, config_entry(source)))


def save_compressed_tensors(
    source: Path, target: Path, form: str, weights: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """A model as compressed-tensors' compressors store it, and the arguments of its weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    if weights["strategy"] == "block":
        weights = {**weights, "block_structure": [8, 8]}
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=form)
    compressor, tensors = BaseCompressor.get_value_from_registry(form), {}
    for name, tensor in load_file(source / FILE).items():
        if not is_quantized(name) or tensor.ndim != 2:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        each = {"channel": (1, columns), "tensor": (rows, columns), "block": (8, 8)}.get(
            weights["strategy"], (1, weights.get("group_size", 0))
        )
        tiles = tensor.unflatten(1, (-1, each[1])).unflatten(0, (-1, each[0]))  # [a, rows, b, columns]
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
        common = generate_gparam(low.min(), high.max()) if weights["strategy"] == "tensor_group" else None
        scale, zero = calculate_qparams(low, high, arguments, global_scale=common)
        module = name.removesuffix("weight")
        state = {"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}
        if weights["strategy"] == "tensor":
            state = {**state, "weight_scale": scale.view(1), "weight_zero_point": zero.view(1)}
        if common is not None:
            state["weight_global_scale"] = common
        if arguments.symmetric:
            del state["weight_zero_point"]
        tensors |= {module + ending: own for ending, own in compressor.compress(state, scheme).items()}
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    entry = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return rewrite(source, target, tensors, entry), weights
