"""AutoRound's own exports: in the layout of another format each, which their `packing_format` names.

What is decoded has the bits of AutoRound's `QuantLinear` for processors, which are those of the formats.

Source: https://github.com/intel/auto-round, arXiv:2309.05516.
"""

from collections.abc import Mapping
from dataclasses import replace

from moetool.checkpoint.stored.awq import FORMAT as AWQ
from moetool.checkpoint.stored.compressed_tensors import FORMAT as COMPRESSED_TENSORS
from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.fp8 import FORMAT as FP8
from moetool.checkpoint.stored.gptq import FORMAT as GPTQ
from moetool.errors import InvalidInputError

_PLAIN = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")  # zero points as they are
_LESS_ONE = ("auto", "auto_round:gptq", "auto_round:auto_gptq", "auto_round:auto_gptq:exllamav2")
_AWQ = ("auto_round:awq", "auto_round:auto_awq")
_FP8 = ("auto_round:fp8", "auto_round:fp8_static")
_FLOATS = "auto_round:llm_compressor"
_DECODED = ("auto_round:auto_gptq", "auto_round", "auto_round:auto_awq", "auto_round:fp8", _FLOATS)
_MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_SCHEMES: dict[tuple[str, object], tuple[str, dict[str, object]]] = {  # by kind of numbers and their bits
    ("mx", 4): ("mxfp4-pack-quantized", {"num_bits": 4, **_MX}),
    ("mx", 8): ("mxfp8-quantized", {"num_bits": 8, **_MX}),
    ("nv", 4): (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


def _layout(files: QuantizedFiles) -> tuple[StoredFormat, QuantizedFiles]:
    """The format that the files are laid out in, and the files with the entry that it would have there."""
    entry = files.entry
    form = str(entry.get("packing_format") or entry.get("backend") or "auto")
    if entry.get("rotation_config") or entry.get("spinquant_config"):
        raise InvalidInputError(
            f"{files.path}: AutoRound has rotated its weights, which moetool does not decode. Take the checkpoint in "
            "16 bits."
        )
    if form in _PLAIN or form in _LESS_ONE:
        own = "gptq" if form in _LESS_ONE else "gptq_v2"
        return GPTQ, replace(files, entry={**entry, "checkpoint_format": own})
    if form in _AWQ:
        return AWQ, replace(files, entry={**entry, "version": "gemm"})
    if form in _FP8:
        return FP8, files
    kind, bits = str(entry.get("data_type"))[:2], entry.get("bits")
    others = {layer.get("bits", bits) for layer in _layers(entry).values()} - {bits, 16}
    if form != _FLOATS or (kind, bits) not in _SCHEMES or others:
        told = f" with {entry.get('data_type')!r} in {', '.join(map(str, (bits, *others)))} bits" * (form == _FLOATS)
        raise InvalidInputError(
            f"{files.path} is in the layout '{form}' of AutoRound{told}; moetool decodes {', '.join(_DECODED)}, the "
            "last with mx_fp in 4 or 8 bits, or nv_fp in 4. Take the checkpoint in 16 bits."
        )
    layout, weights = _SCHEMES[kind, bits]
    groups = {"group_0": {"format": layout, "weights": weights, "targets": ["Linear"]}}
    return COMPRESSED_TENSORS, replace(files, entry={"config_groups": groups})


def _layers(entry: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Settings of single modules (`extra_config`: bits, group size …) that differ from the model's, by module name."""
    given = entry.get("extra_config")
    modules = given.items() if isinstance(given, Mapping) else ()
    return {name: own for name, own in modules if isinstance(own, Mapping)}


def _find(files: QuantizedFiles) -> StoredTensors:
    form, laid_out = _layout(files)
    found = form.find(laid_out)
    return replace(found, description=f"AutoRound's {found.description}")


def _bits(files: QuantizedFiles, module: str) -> float:
    bits = _layers(files.entry).get(module.removesuffix("."), {}).get("bits")
    if isinstance(bits, int) and bits >= 16:
        return 8 * files.dtype.itemsize
    form, laid_out = _layout(files)
    return form.bits(laid_out, module)


FORMAT = StoredFormat(("auto-round", "intel/auto-round"), _find, _bits)
