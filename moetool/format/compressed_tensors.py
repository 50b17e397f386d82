"""Layout on disk of compressed-tensors' `pack-quantized` format.

An expert's matrix has three tensors, and an entry of `config.json` says which modules have them.

Source: https://github.com/vllm-project/compressed-tensors.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import torch

from moetool.architectures import Architecture, Role

METHOD_NAME, PACKED_FORMAT = "compressed-tensors", "pack-quantized"
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
PACKED_BITS = (2, 3, 4, 8)  # that moetool writes
# Bits and groups that vLLM's fused MoE kernels take.
KERNEL_BITS, KERNEL_GROUPS = (4, 8), (32, 64, 128)


def packed_tensors(
    matrix: tuple[int, int], bits: int, group: int, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of the tensors that store a matrix `[out, in]`; `dtype` is that of the scales."""
    rows, columns = matrix
    return {
        PACKED: (torch.int32, (rows, -(-columns * bits // 32))),
        SCALE: (dtype, (rows, columns // group)),
        SHAPE: (torch.int64, (2,)),
    }


def packed_entry(
    architecture: Architecture,
    layers: Sequence[int],
    roles: Sequence[Role],
    others: Iterable[str],
    bits: int,
    group: int,
) -> dict[str, object]:
    """The `quantization_config` of a checkpoint whose experts are packed, and nothing else.

    Args:
        architecture: of one matrix per tensor.
        layers: whose experts are packed.
        roles: an expert's matrices.
        others: names of the other matrices' tensors, which readers are told to leave as they are.
        bits: of a code.
        group: inputs that share a scale.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }
    scheme = {
        "targets": _targets(architecture, layers, roles),
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": PACKED_FORMAT,
    }
    return {
        "quant_method": METHOD_NAME,
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"experts": scheme},
        "ignore": _ignored(others),
    }


def _targets(architecture: Architecture, layers: Sequence[int], roles: Sequence[Role]) -> list[str]:
    """One pattern for every expert's modules, under their own names and those that vLLM always asks for."""
    paths = [_module(architecture.weight_name(0, 0, role)).rpartition(".") for role in roles]
    names = dict.fromkeys([*(name for _, _, name in paths), *(f"{role}_proj" for role in roles)])
    return [rf"re:{_pattern(paths[0][0], layers)}\.({'|'.join(names)})$"]


def _ignored(others: Iterable[str]) -> list[str]:
    """Names of modules; those of the same name in many layers as one pattern."""
    numbered: dict[str, set[int]] = {}
    plain = {"lm_head"}  # which a model with tied embeddings has no tensor of
    for module in map(_module, others):
        layer = next((part for part in module.split(".") if part.isdigit()), None)
        if layer is None:
            plain.add(module)
        else:
            numbered.setdefault(re.sub(r"\.\d+\.", ".0.", module), set()).add(int(layer))
    return [*sorted(plain), *(f"re:{_pattern(module, sorted(numbered[module]))}$" for module in sorted(numbered))]


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _pattern(module: str, layers: Sequence[int]) -> str:
    """A module's name as a regular expression in which the first number is one of `layers` and others are free."""
    numbers = chain([f"({'|'.join(map(str, layers))})"], repeat(r"\d+"))
    return r"\.".join(next(numbers) if part.isdigit() else re.escape(part) for part in module.split("."))
