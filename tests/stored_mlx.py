"""Tiny checkpoints as mlx-lm writes them, written out plainly from what its format is."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stored_bits import CONFIG, FILE
from stored_words import in_words
from torch import Tensor

NORMS = re.compile(r"(input_layernorm|post_attention_layernorm|q_norm|k_norm|model\.norm)\.weight$")
ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mlx_tensors(matrix: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """The tensors of matrices `[…, out, in]`, with the scales and biases of the least and the largest of each group."""
    groups = matrix.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    scales, biases = ((high - low) / (2**bits - 1)).clamp(min=1e-4).to(matrix.dtype), low.to(matrix.dtype)
    codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 2**bits - 1)
    rows = codes.flatten(-2).int()
    words = in_words(rows.reshape(-1, rows.shape[-1]), bits).view(*rows.shape[:-1], -1)
    return {"weight": words.view(torch.uint32), "scales": scales, "biases": biases}


def decoded_mlx(held: dict[str, Tensor], bits: int, group: int) -> Tensor:
    """What the tensors stand for, each product and each sum rounded to the dtype of the scales."""
    words, scales, biases = held["weight"], held["scales"], held["biases"]
    spread = (words.view(torch.int32).unsqueeze(-1) >> torch.arange(32)) & 1
    codes = (spread.flatten(-2).unflatten(-1, (-1, bits)) * 2 ** torch.arange(bits)).sum(-1).to(scales.dtype)
    return codes * scales.repeat_interleave(group, -1) + biases.repeat_interleave(group, -1)


def in_its_order(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A model's tensors as mlx-lm has them in memory (`sanitize` of its families)."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if config["model_type"] == "gpt2":
            own = "model." + name.removeprefix("transformer.")
            made[own] = tensor.T if re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name) else tensor
        elif ".conv" in name and tensor.ndim == 3:
            made[name] = tensor.transpose(1, 2)
        elif config["model_type"] == "qwen3_next" and NORMS.search(name):
            made[name] = tensor + 1
        elif name.endswith("shared_mlp.input_linear.weight"):
            base = name.replace("shared_mlp.input_linear", "mlp.{}_proj")
            made[base.format("gate")], made[base.format("up")] = tensor.chunk(2)
        elif name.endswith("shared_mlp.output_linear.weight"):
            made[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
        elif found := re.fullmatch(r"(.*)\.experts\.0\.(\w+)\.weight", name):
            alike = re.compile(rf"{re.escape(found[1])}\.experts\.\d+\.{found[2]}\.weight")
            stacked = torch.stack([tensors[own] for own in sorted(filter(alike.fullmatch, tensors), key=_expert)])
            made[f"{found[1]}.switch_mlp.{ROLES.get(found[2], found[2])}.weight"] = stacked
        elif re.search(r"\.experts\.\d+\.", name):
            continue
        elif name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            made[f"{base}gate_proj.weight"], made[f"{base}up_proj.weight"] = tensor.mT[:, ::2], tensor.mT[:, 1::2]
        elif name.endswith("experts.gate_up_proj_bias"):
            base = name.removesuffix("gate_up_proj_bias")
            made[f"{base}gate_proj.bias"], made[f"{base}up_proj.bias"] = tensor[:, ::2], tensor[:, 1::2]
        elif name.endswith("experts.down_proj"):
            made[f"{name}.weight"] = tensor.mT
        elif name.endswith("experts.down_proj_bias"):
            made[name.replace("_bias", ".bias")] = tensor
        elif name.endswith("kv_b_proj.weight"):
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys = config["qk_nope_head_dim"]
            made[name.replace("kv_b_proj", "embed_q")] = heads[:, :keys].mT
            made[name.replace("kv_b_proj", "unembed_out")] = heads[:, keys:]
        else:
            made[name] = tensor
    return made


def _expert(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


def save_mlx(
    source: Path, target: Path, bits: int | None = 4, group: int = 32, own: dict[str, dict[str, int]] | None = None
) -> Path:
    """A model as `mlx_lm.convert` saves it, quantized unless `bits` is `None`; `own` are settings of single modules."""
    config, settings = json.loads((source / CONFIG).read_text()), own or {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in in_its_order(load_file(source / FILE), config).items():
        module, _, ending = name.rpartition(".")
        is_matrix = ending == "weight" and tensor.ndim > 1 and tensor.shape[-1] % group == 0
        if bits is None or not is_matrix:
            tensors[name] = tensor
            continue
        told = settings.get(module, {"bits": bits, "group_size": group})
        coded = mlx_tensors(tensor, told["bits"], told["group_size"])
        tensors |= {f"{module}.{part}": held for part, held in coded.items()}
    if bits is not None:
        entry = {"group_size": group, "bits": bits, "mode": "affine", **settings}
        config |= {"quantization": entry, "quantization_config": entry}
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in (FILE, CONFIG):
            (target / file.name).write_bytes(file.read_bytes())
    (target / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / FILE, {"format": "mlx"})
    return target
