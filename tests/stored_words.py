"""Tiny checkpoints in GPTQ, AWQ, bitsandbytes and ModelOpt, written out plainly from what these formats are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from stored_bits import FILE, is_quantized, rewrite
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight outputs, in a word


def in_words(codes: Tensor, bits: int) -> Tensor:
    """Rows of whole numbers as one stream of bits each, the lowest first, in words of 32 bits."""
    each = (codes.numpy()[..., None] >> np.arange(bits)) & 1
    stream = each.reshape(len(codes), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def gptq_tensors(
    codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, bits: int, *, less_one: bool
) -> dict[str, Tensor]:
    """Tensors of a module: codes `[out, in]`, zero points and scales `[out, groups]`, the group of each input."""
    return {
        "qweight": in_words(codes, bits).T.contiguous(),
        "qzeros": in_words(zeros.T - int(less_one), bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }


def awq_tensors(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Tensors of a module: codes `[out, in]`, zero points and scales `[out, groups]`."""
    words = [in_words(own.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4) for own in (codes, zeros)]
    return {"qweight": words[0], "qzeros": words[1], "scales": scales.T.contiguous()}


def coded(matrix: Tensor, groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales in fp16 of a matrix, by the least and the largest of each group of its inputs."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    zeros, scales = torch.empty(len(matrix), count).int(), torch.empty(len(matrix), count).half()
    for group in range(count):
        own = matrix.float()[:, groups == group]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scales[:, group] = ((high - low) / top).clamp(min=1e-3)
        zeros[:, group] = (-low / scales[:, group].float()).round().clamp(1, top).int()
    codes = (matrix.float() / scales.float()[:, groups]).round() + zeros[:, groups]
    return codes.clamp(0, top).int(), zeros, scales


def save_words(source: Path, target: Path, entry: dict[str, Any], of: Callable[[Tensor], dict[str, Tensor]]) -> Path:
    """A model whose matrices are stored as the tensors that `of` makes of each, beside the names of their modules."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        module = name.removesuffix("weight")
        own = {f"{module}{part}": held for part, held in of(tensor).items()} if is_quantized(name) else {name: tensor}
        tensors |= own
    return rewrite(source, target, tensors, entry)


def save_gptq(
    source: Path, target: Path, bits: int = 4, group: int = 8, form: str = "gptq", *, desc_act: bool = True
) -> Path:
    """A model in GPTQ, its inputs in an order of their own if `desc_act`."""

    def of(matrix: Tensor) -> dict[str, Tensor]:
        inputs = matrix.shape[1]
        groups = (
            torch.arange(inputs) * 7 % inputs // group if inputs % 7 and desc_act else torch.arange(inputs) // group
        )
        return gptq_tensors(*coded(matrix, groups, bits), groups, bits, less_one=form == "gptq")

    entry = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "checkpoint_format": form}
    return save_words(source, target, entry, of)


def save_awq(source: Path, target: Path, group: int = 8) -> Path:
    """A model in AWQ."""
    entry = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return save_words(
        source, target, entry, lambda matrix: awq_tensors(*coded(matrix, torch.arange(matrix.shape[1]) // group, 4))
    )


def save_bitsandbytes(source: Path, target: Path, kind: str = "nf4", *, nested: bool = True) -> Path:
    """A model whose linear layers bitsandbytes stores in 4 bits, or in 8 (`kind` "int8")."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    def of(matrix: Tensor) -> dict[str, Tensor]:
        if kind == "int8":
            codes, scales, _ = int8_vectorwise_quant(matrix.half())
            return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        codes, state = quantize_4bit(matrix, blocksize=64, compress_statistics=nested, quant_type=kind)
        return {"weight": codes, **{f"weight.{key}": own for key, own in state.as_dict(packed=True).items()}}

    entry = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    entry |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return save_words(source, target, entry, of)


def nvfp4_tensors(matrix: Tensor) -> dict[str, Tensor]:
    """NVFP4 as ModelOpt rounds it: to the nearest of eight sizes, scales of 16 numbers in FP8, and one for these."""
    wide = matrix.float()
    common = wide.abs().amax() / (6 * 448)
    tiles = wide.unflatten(1, (-1, 16))
    scales = (tiles.abs().amax(2) / (6 * common)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    unit = tiles / (scales.float() * common)[:, :, None]
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (unit.abs()[..., None] - sizes).abs().argmin(-1) + 8 * (unit < 0)
    codes = codes.flatten(1).to(torch.uint8)
    packed = codes[:, 1::2] << 4 | codes[:, ::2]
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": common, "input_scale": torch.ones(())}


def save_nvfp4(source: Path, target: Path) -> Path:
    """A model in ModelOpt's NVFP4; matrices that groups of 16 do not divide stay as they are."""
    entry = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*gate"]}

    def of(matrix: Tensor) -> dict[str, Tensor]:
        return nvfp4_tensors(matrix) if matrix.shape[1] % 16 == 0 else {"weight": matrix}

    return save_words(source, target, entry, of)
