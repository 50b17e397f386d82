"""Words of GGUF, llama.cpp's format, that all families share: files, tensors, metadata, the order of rows.

Source: https://github.com/ggml-org/llama.cpp (`conversion/`, `src/models/`),
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.errors import UsageError

# Files of an export: the model, what llama-quantize can be told of it, and what Ollama is.
MODEL, IMATRIX, TENSOR_TYPES, MODELFILE = "model.gguf", "imatrix.gguf", "tensor-types.txt", "Modelfile"

EXPERTS: Mapping[Role, str] = MappingProxyType({role: f"ffn_{role}_exps.weight" for role in ("gate", "up", "down")})
GATE_AND_UP = "ffn_gate_up_exps.weight"  # rows of gate above those of up, as some files have them
SHARED_EXPERT: Mapping[Role, str] = MappingProxyType(
    {role: f"ffn_{role}_shexp.weight" for role in ("gate", "up", "down")}
)
SHARED_IN_TWO: Mapping[Role, str] = MappingProxyType({**SHARED_EXPERT, "gate": SHARED_EXPERT["up"]})  # gate before up
EXPERT_BIASES: Mapping[Role, str] = MappingProxyType({role: f"ffn_{role}_exps.bias" for role in ("gate", "up", "down")})
EMBEDDINGS, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_ROPE_FACTORS: Mapping[str, str] = MappingProxyType(
    {f"{length}_factor": f"rope_factors_{length}.weight" for length in ("short", "long")}
)
# Entries of `config.json` and keys of the metadata, after the name of the architecture: whole numbers, then fractions.
COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "vocab_size": "vocab_size",
    }
)
FRACTIONS: Mapping[str, str] = MappingProxyType({"rms_norm_eps": "attention.layer_norm_rms_epsilon"})
HEAD_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
WIDTH, EXPERT_WIDTH, SHARED_WIDTH = (
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)
SHARED_COUNT, PREDICTORS = "expert_shared_count", "nextn_predict_layers"
DENSE_LAYERS, GROUPS = "leading_dense_block_count", ("expert_group_count", "expert_group_used_count")
GATING, STATES, OWN_INDEXERS = "expert_gating_func", "attention.recurrent_layers", "attention.indexer.types"
EXPERT_COUNT, EXPERTS_USED = "expert_count", "expert_used_count"
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
ROPE_BASE, ROPE_PATTERN, SCALING = "rope.freq_base", "attention.rope_pattern", "rope.scaling."


def gguf_library() -> ModuleType:
    """The library `gguf`. Raises `UsageError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UsageError("GGUF needs the library gguf: pip install moetool[gguf].") from error
    return gguf


def layer_in_file(layer: int, name: str) -> str:
    """The name of a layer's tensor in a GGUF file, such as `blk.3.ffn_up_exps.weight`."""
    return f"blk.{layer}.{name}"


def layer_of(name: str) -> int:
    """The layer of a tensor, by GGUF's name; -1 for what is in none."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return -1 if layer is None else int(layer[1])


def place(name: str) -> tuple[int, bool, str]:
    """The key by which tensors of a file are sorted: what is outside the layers first, embeddings before the rest; then
    layer by layer."""
    layer = layer_of(name)
    return layer, layer < 0 and name != EMBEDDINGS, name


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows (or entries of a bias) `[heads · width, …]` with the halves of every head interleaved, as llama.cpp turns
    neighbours: its `LlamaModel.permute`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`: every head's even rows come first, then its odd ones."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def with_first(order: Callable[[Tensor, int], Tensor], rows: Tensor, heads: int, first: int) -> Tensor:
    """Rows `[heads · width, …]` with the `first` of every head in the `order` of `interleaved` or `halved`."""
    by_head = rows.unflatten(0, (heads, -1))
    ordered = order(by_head[:, :first].flatten(0, 1), heads).unflatten(0, (heads, -1))
    return torch.cat([ordered, by_head[:, first:]], dim=1).flatten(0, 1)
