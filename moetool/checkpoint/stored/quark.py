"""Quark, of AMD: FP8 per tensor, per row or in blocks, and MXFP4, two numbers in a byte with exponents per group of 32.

Source: https://quark.docs.amd.com (`Pack_fp4` of `quark.torch.utils.pack`, 0.13).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moetool.checkpoint.stored.formats import QuantizedFiles, StoredFormat, StoredTensors
from moetool.checkpoint.stored.fp8 import FORMAT as FP8
from moetool.errors import InvalidInputError

_BITS = {"fp4": 4.25, "fp8_e4m3": 8.0, "fp8_e5m2": 8.0}


def _find(files: QuantizedFiles) -> StoredTensors:
    kinds = sorted(set(_kinds(files)))
    if unknown := [kind for kind in kinds if kind not in _BITS]:
        raise InvalidInputError(
            f"{files.path} has weights in Quark's {unknown[0]}; moetool decodes {', '.join(_BITS)}. Take the "
            "checkpoint in 16 bits."
        )
    found = FP8.find(files)
    return replace(found, description=f"Quark's {', '.join(kinds)}")


def _kinds(files: QuantizedFiles) -> Iterator[str]:
    """Names of the dtypes that weights have, as Quark calls them."""
    layers = files.entry.get("layer_quant_config")
    own = layers.values() if isinstance(layers, Mapping) else ()
    for config in (files.entry.get("global_quant_config"), *own):
        weight = config.get("weight") if isinstance(config, Mapping) else None
        if isinstance(weight, Mapping):
            kind, scales = str(weight.get("dtype")), weight.get("scale_format")
            yield kind if kind != "fp4" or scales in (None, "e8m0") else f"{kind} with scales in {scales}"
        elif weight is not None:
            yield "several dtypes one after the other"


def _bits(files: QuantizedFiles, module: str) -> float:
    return max((_BITS.get(kind, 8.0) for kind in _kinds(files)), default=8.0)


FORMAT = StoredFormat(("quark",), _find, _bits)
