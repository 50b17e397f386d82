"""Rotary embeddings of the model in a GGUF file, in transformers' words (`rope_parameters`)."""

import math
from typing import Any

import torch

from moetool.checkpoint.gguf_metadata import GgufMetadata, decimal
from moetool.format.gguf.words import HEAD_WIDTHS, LONG_ROPE_FACTORS, ROPE_BASE, ROPE_FACTORS, SCALING
from moetool.format.gguf.yarn import yarn_words

_TOLERANCE = 1e-4  # of factors by pair of channels, relative
_STILL = 1e20  # factors above this are of pairs that do not turn


def rotary_embeddings(metadata: GgufMetadata, head_width: int) -> dict[str, Any]:
    """The parameters of rotary embeddings, of layers that attend to all of a text."""
    kind = metadata.entry(f"{SCALING}type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": decimal(metadata.entry(ROPE_BASE) or 10000.0)}
    turned = metadata.entry(HEAD_WIDTHS[2])
    if metadata.family.is_partial and turned is not None:
        rope["partial_rotary_factor"] = int(turned) / head_width
    if metadata.family.axes and (axes := metadata.entry("rope.dimension_sections")):
        rope["mrope_section"] = [pairs for pairs in axes if pairs]
    if metadata.family.has_two_widths:
        return {**rope, **_proportional(metadata)}
    if ROPE_FACTORS in metadata.shapes:
        return {**rope, **_slowed(metadata, rope["rope_theta"])}
    if LONG_ROPE_FACTORS["long_factor"] in metadata.shapes:
        rope |= {key: list(map(decimal, metadata.read(own).tolist())) for key, own in LONG_ROPE_FACTORS.items()}
        rope["original_max_position_embeddings"] = int(metadata.number(f"{SCALING}original_context_length"))
        strength = decimal(metadata.number(f"{SCALING}attn_factor"))
        return {**rope, "rope_type": "longrope", "attention_factor": strength}
    if kind in (None, "none"):
        return rope
    if kind not in ("linear", "yarn"):
        raise metadata.unread(f"rotary embeddings of a kind ({kind})")
    rope |= {"rope_type": kind, "factor": decimal(metadata.number(f"{SCALING}factor"))}
    return rope if kind == "linear" else {**rope, **_yarn(metadata, rope["factor"])}


def _yarn(metadata: GgufMetadata, factor: float) -> dict[str, object]:
    """Entries of `rope_parameters` that a model stretched by YaRN has, beside its kind, base and factor."""
    found: dict[str, object] = {
        "original_max_position_embeddings": int(metadata.number(f"{SCALING}original_context_length"))
    }
    for key in ("beta_fast", "beta_slow"):
        if (value := metadata.entry(f"{SCALING}yarn_{key}")) is not None:
            found[key] = decimal(value)
    if (strength := metadata.entry(f"{SCALING}yarn_attn_factor")) is not None:  # as llama.cpp's converter writes it
        found["attention_factor"] = decimal(strength)
    else:
        attn_factor, multiplier = (
            metadata.entry(f"{SCALING}attn_factor"),
            metadata.entry(f"{SCALING}yarn_log_multiplier"),
        )
        words = yarn_words(metadata.family, 1.0 if attn_factor is None else attn_factor, multiplier or 0.0, factor)
        found |= {key: decimal(word) for key, word in words.items()}
    if (warmth := metadata.entry("attention.temperature_scale")) is not None:
        found["llama_4_scaling_beta"] = decimal(warmth)
        metadata.entry("attention.temperature_length")
    return found


def _proportional(metadata: GgufMetadata) -> dict[str, object]:
    """Parameters of rotary embeddings that turn the first pairs of channels and let the others be."""
    factors = metadata.read(ROPE_FACTORS)
    turned = int((factors == 1).sum())
    if not bool((factors[:turned] == 1).all() and (factors[turned:] > _STILL).all()):
        raise metadata.unread(f"rotary embeddings that do not turn the first pairs of channels alone ({ROPE_FACTORS})")
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}


def _slowed(metadata: GgufMetadata, base: float) -> dict[str, object]:
    """Llama 3's parameters of the factors by which each pair of channels turns slower.

    A pair whose wavelength is w turns slower by factor if w > original / low_freq_factor, not at all if w <
    original / high_freq_factor, and in between by 1 / ((1 - s) / factor + s), with s = (original / w -
    low_freq_factor) / (high_freq_factor - low_freq_factor). The three scale together: low_freq_factor is 1 here.
    Source: transformers, `modeling_rope_utils.py`.
    """
    factors = metadata.read(ROPE_FACTORS).double()
    steps = torch.arange(len(factors), dtype=torch.float64) / len(factors)
    lengths = 2 * math.pi * base**steps
    factor = decimal(float(factors.max()))
    shares = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else torch.ones_like(factors)
    between = (shares > _TOLERANCE) & (shares < 1 - _TOLERANCE)
    high, count = 4.0, int(between.sum())
    if count > 1:  # s = a / w - b
        columns = torch.stack([1 / lengths[between], -torch.ones(count, dtype=torch.float64)], dim=1)
        a, b = torch.linalg.lstsq(columns, shares[between, None]).solution[:, 0].tolist()
        high, original = round(1 + 1 / b, 3), round(a / b)
    elif count:
        original = round(float(lengths[between] * (1 + (high - 1) * shares[between])))
    else:  # any length between the longest that turns as it did and the shortest that is slowed down
        least = high * max([1.0, *lengths[shares >= 0.5].tolist()])
        original = round(math.sqrt(least * min([4 * least, *lengths[shares < 0.5].tolist()])))
    found = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    expected = ((original / lengths - 1) / (high - 1)).clamp(0, 1)
    if bool(((1 / ((1 - expected) / factor + expected)) / factors - 1).abs().max() > _TOLERANCE):
        raise metadata.unread(f"rotary embeddings that are not slowed down as Llama 3's ({ROPE_FACTORS})")
    return {"rope_type": "llama3", **found, "original_max_position_embeddings": original}
