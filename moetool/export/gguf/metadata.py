"""Metadata of a GGUF file that describe its model: sizes, attention, rotary embeddings, windows, experts."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from moetool.export.gguf.facts import LINEAR
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.rope import LONG_ROPE, ROPE_SCALINGS, long_rope_strength, stretch
from moetool.format.gguf.blocks import MXFP4, StoredType
from moetool.format.gguf.words import (
    COUNTS,
    DENSE_LAYERS,
    EXPERT_COUNT,
    EXPERTS_USED,
    FRACTIONS,
    GROUPS,
    HEAD_WIDTHS,
    ROPE_BASE,
    ROPE_PATTERN,
    SCALING,
    SHARED_WIDTH,
    STATES,
    WIDTH,
    WINDOW,
    WINDOW_PATTERN,
    gguf_library,
)
from moetool.format.gguf.yarn import yarn_strengths

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig


def describe_model(writer: "GGUFWriter", source: GgufSource) -> None:
    """Write the metadata of the model itself into the library's `GGUFWriter`."""
    config, family, start = source.config, source.family, source.family.architecture
    heads = dict(zip(("num_attention_heads", "num_key_value_heads"), source.heads_in_file, strict=True))
    for key, own in {**COUNTS, **family.counts}.items():
        if own in family.derived:
            continue
        if key == "num_key_value_heads" and source.heads_by_layer is not None:
            writer.add_array(f"{start}.{own}", source.heads_by_layer)
        elif key == "num_attention_heads" and len(set(source.query_heads)) > 1:
            writer.add_array(f"{start}.{own}", source.query_heads)
        elif (value := heads.get(key, getattr(config, key, None))) is not None:
            writer.add_uint32(f"{start}.{own}", int(value))
    for key, own in {**FRACTIONS, **family.multipliers}.items():
        if (value := getattr(config, key, None)) is not None:
            writer.add_float32(f"{start}.{own}", float(value))
    for key, own in family.of_layers.items():
        if (values := getattr(config, key, None)) is not None:
            writer.add_array(f"{start}.{own}", [float(value or 0.0) for value in values[: source.layers]])
    for key, own in family.flags.items():
        writer.add_bool(f"{start}.{own}", bool(getattr(config, key)))
    for own, (one, other) in family.products.items():
        writer.add_uint32(f"{start}.{own}", int(getattr(config, one)) * int(getattr(config, other)))
    for own, make in family.derived.items():
        if (value := make(config)) is None:
            continue
        write = writer.add_uint32 if isinstance(value, int) else writer.add_array
        (writer.add_float32 if isinstance(value, float) else write)(f"{start}.{own}", value)
    said = {own: numbers[getattr(config, key, None)] for key, (own, numbers) in family.choices.items()}
    for own, value in {**family.fixed, **said}.items():
        write = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else write)(f"{start}.{own}", value)
    for key, own in family.of_whole.items():
        if source.is_within and (value := getattr(source.whole_config, key, None)) is not None:
            writer.add_uint32(f"{start}.{own}", int(value))
    _describe_constants(writer, source)
    if family.has_deep_stack:
        eyes = getattr(source.whole_config, "vision_config", None)
        writer.add_uint32(f"{start}.n_deepstack_layers", len(getattr(eyes, "deepstack_visual_indexes", ())))
    _describe_heads(writer, source)
    _describe_rope(writer, source)
    _describe_windows(writer, source)
    if family.attention_interval is not None:
        writer.add_uint32(f"{start}.{family.attention_interval}", source.attention_interval)
    _describe_feed_forward(writer, source)


def _describe_constants(writer: "GGUFWriter", source: GgufSource) -> None:
    """Numbers of 64 bits, which no tensor of a file holds, and those of which every layer has one."""
    kinds = gguf_library().GGUFValueType
    for name, own in source.constants.items():
        empty = torch.zeros(source.checkpoint.info(name).shape, dtype=torch.int64)
        numbers = empty if source.checkpoint.is_imagined else source.checkpoint.read(name)
        key = f"{source.family.architecture}.{own}"
        writer.add_key_value(key, numbers.tolist(), kinds.ARRAY, sub_type=kinds.UINT64)
    for own, names in source.numbers.items():
        held = [0.0 if source.checkpoint.is_imagined else source.checkpoint.read(name).item() for name in names]
        writer.add_array(own, held)


def _describe_heads(writer: "GGUFWriter", source: GgufSource) -> None:
    config, start, width = source.config, source.family.architecture, source.head_width
    if source.family.has_two_widths:
        for own in HEAD_WIDTHS:
            writer.add_uint32(f"{start}.{own}", source.whole_width)
        for own in HEAD_WIDTHS[:2] if source.rope_of_windows.get("partial_rotary_factor") else HEAD_WIDTHS:
            writer.add_uint32(f"{start}.{own}_swa", width)
        return
    if source.family.is_latent:
        widths = _latent_widths(config)
        if source.windows and source.family.window_period is not None:
            own = source.config_of(source.windows.index(True))
            widths |= {f"{key}_swa": channels for key, channels in _latent_widths(own).items()}
            widths["attention.kv_lora_rank_swa"] = int(own.kv_lora_rank)
            widths[f"{HEAD_WIDTHS[1]}_mla_swa"] = int(own.v_head_dim)
    else:
        values = int(getattr(config, "v_head_dim", None) or width)
        turned = int(width * source.rotary_share) * (2 if source.family.doubles_turned else 1)
        widths = dict(zip(HEAD_WIDTHS, (width, values, turned), strict=True))
    for own, channels in widths.items():
        writer.add_uint32(f"{start}.{own}", channels)


def _latent_widths(config: "PreTrainedConfig") -> dict[str, int]:
    """Channels of the one head of keys and values that llama.cpp computes latent attention with, and of its own."""
    rank, turned = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    own = int(config.qk_nope_head_dim) + turned
    return {HEAD_WIDTHS[0]: rank + turned, HEAD_WIDTHS[1]: rank, f"{HEAD_WIDTHS[0]}_mla": own}


def _describe_rope(writer: "GGUFWriter", source: GgufSource) -> None:
    rope, start = source.rope, source.family.architecture
    base, width, kind = float(rope.get("rope_theta", 10000.0)), source.head_width, rope.get("rope_type", "default")
    if source.family.turns_by_layer:
        writer.add_array(f"{start}.{ROPE_PATTERN}", [bool(own) for own in source.config.layer_rope_theta])
    if kind == "dynamic" and source.family.stretches_rope:
        base *= float(rope["alpha"]) ** (width / (width - 2))
    writer.add_float32(f"{start}.{ROPE_BASE}", base)
    if (warmth := rope.get("llama_4_scaling_beta")) is not None:
        writer.add_float32(f"{start}.attention.temperature_scale", float(warmth))
        writer.add_uint32(f"{start}.attention.temperature_length", int(rope["original_max_position_embeddings"]))
    if source.family.axes:
        axes = list(rope.get("mrope_section") or source.family.axes)
        writer.add_array(f"{start}.rope.dimension_sections", [*axes, *(0 for _ in range(4 - len(axes)))])
    if kind == LONG_ROPE:
        writer.add_uint32(f"{start}.{SCALING}original_context_length", int(rope["original_max_position_embeddings"]))
        writer.add_float32(f"{start}.{SCALING}attn_factor", long_rope_strength(source))
    if kind not in ROPE_SCALINGS:
        return
    factor = stretch(source)
    writer.add_string(f"{start}.{SCALING}type", kind)
    writer.add_float32(f"{start}.{SCALING}factor", factor)
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or source.config.max_position_embeddings
        writer.add_uint32(f"{start}.{SCALING}original_context_length", int(original))
        for key in ("beta_fast", "beta_slow"):
            if (value := rope.get(key)) is not None:
                writer.add_float32(f"{start}.{SCALING}yarn_{key}", float(value))
        attn_factor, log_multiplier = yarn_strengths(source.family, rope, factor)
        if attn_factor != 1:
            writer.add_float32(f"{start}.{SCALING}attn_factor", attn_factor)
        if log_multiplier:
            writer.add_float32(f"{start}.{SCALING}yarn_log_multiplier", log_multiplier)


def _describe_windows(writer: "GGUFWriter", source: GgufSource) -> None:
    start, period = source.family.architecture, source.family.window_period
    if period is None or not source.windows:
        return
    writer.add_uint32(f"{start}.{WINDOW}", int(source.config.sliding_window))
    if not period:
        writer.add_array(f"{start}.{WINDOW_PATTERN}", source.windows)
    if source.family.is_indexed:
        writer.add_array(f"{start}.attention.indexer.types", [not windowed for windowed in source.windows])
    rope = source.rope_of_windows
    writer.add_float32(f"{start}.{ROPE_BASE}_swa", float(rope["rope_theta"]))
    share = rope.get("partial_rotary_factor")
    if (share is not None or source.family.turns_shares) and not source.family.is_latent:
        writer.add_uint32(f"{start}.{HEAD_WIDTHS[2]}_swa", int(source.head_width * float(share or 1.0)))


def _describe_feed_forward(writer: "GGUFWriter", source: GgufSource) -> None:
    config, family, start = source.config, source.family, source.family.architecture
    if source.experts is None:
        assert source.dense is not None
        if family.skips_experts:
            held = source.dense.ffn_layers
            widths = [source.dense.intermediate if layer in held else 0 for layer in range(source.layers)]
            writer.add_array(f"{start}.{WIDTH}", widths)
        else:
            writer.add_uint32(f"{start}.{WIDTH}", source.dense.intermediate)
        return
    shape, moe = source.experts.shape, source.experts.architecture
    writer.add_uint32(f"{start}.{EXPERT_COUNT}", shape.experts)
    writer.add_uint32(f"{start}.{EXPERTS_USED}", shape.top_k)
    writer.add_uint32(f"{start}.{family.width_key}", shape.intermediate)
    if family.skips_experts:
        widths = [shape.intermediate if layer in moe.moe_layers else 0 for layer in range(source.layers)]
        writer.add_array(f"{start}.{WIDTH}", widths)
    elif family.width_key != WIDTH:
        writer.add_uint32(f"{start}.{WIDTH}", int(getattr(config, family.dense_width, None) or shape.intermediate))
    if family.has_states:
        writer.add_array(f"{start}.{STATES}", [kind == LINEAR for kind in config.layer_types])
    if source.shared_intermediate:
        writer.add_uint32(f"{start}.{SHARED_WIDTH}", source.shared_intermediate)
    if family.leads_dense:
        writer.add_uint32(f"{start}.{DENSE_LAYERS}", source.dense_layers)
    if family.groups_experts:
        for own, number in zip(GROUPS, moe.groups, strict=True):
            writer.add_uint32(f"{start}.{own}", number)


def file_type(tensors: Iterable[GgufTensor]) -> str:
    """The name that llama.cpp has for a file in the type that most numbers of its tensors have."""
    counted = Counter[StoredType]()
    for tensor in tensors:
        counted[tensor.type] += tensor.numbers
    [(number, _)] = counted.most_common(1)
    sizes = {"q3_k": "_S", "q4_k": "_S", "q5_k": "_S", MXFP4: "_MOE"}
    return "ALL_F32" if number == "f32" else f"MOSTLY_{number.upper()}{sizes.get(number, '')}"
