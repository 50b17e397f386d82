"""Layout of GGUF, llama.cpp's format, by model family: tensor names, order of rows, metadata.

Source: https://github.com/ggml-org/llama.cpp (`conversion/`, `src/models/`),
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType

from torch import Tensor

from moetool.architectures import Architecture, Role
from moetool.architectures.base import Settings, whole_number
from moetool.errors import InvalidInputError, UsageError

# Files of an export: the model, what llama-quantize can be told of it, and what Ollama is.
MODEL, IMATRIX, TENSOR_TYPES, MODELFILE = "model.gguf", "imatrix.gguf", "tensor-types.txt", "Modelfile"

EXPERTS: Mapping[Role, str] = MappingProxyType({role: f"ffn_{role}_exps.weight" for role in ("gate", "up", "down")})
SHARED_EXPERT: Mapping[Role, str] = MappingProxyType(
    {role: f"ffn_{role}_shexp.weight" for role in ("gate", "up", "down")}
)
EMBEDDINGS, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_OUTSIDE = {"model.embed_tokens.weight": EMBEDDINGS, "model.norm.weight": "output_norm.weight", "lm_head.weight": HEAD}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{module}.weight": f"{name}.weight" for module, name in _ATTENTION.items()},
}
_HEAD_NORMS = {f"self_attn.{one}_norm.weight": f"attn_{one}_norm.weight" for one in ("q", "k")}
_DENSE = {f"mlp.{role}_proj.weight": f"ffn_{role}.weight" for role in ("gate", "up", "down")}
_QKV = ("q_proj", "k_proj", "v_proj")
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
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
EXPERT_COUNT, EXPERTS_USED, ROPE_BASE = "expert_count", "expert_used_count", "rope.freq_base"


@dataclass(frozen=True)
class GgufFamily:
    """A family as llama.cpp computes it.

    Attributes:
        model_type: of `config.json`.
        architecture: llama.cpp's name.
        is_moe: whether its layers have experts; all layers then have.
        is_interleaved: whether rotary embeddings turn neighbouring rows of a head's queries and keys, where
            transformers turns rows that are half a head apart.
        has_head_norms: whether queries and keys have norms.
        is_square: whether heads have to add up to the hidden size.
        groups_heads: whether there may be fewer heads of keys than of queries.
        biases: attention modules that may have one.
        needs_head: whether tied embeddings have to be there a second time, as the output matrix.
        experts_key: config key of the number of experts.
        width_key: metadata key of the experts' width.
        shared_width: config key of the shared expert's, of a family that may have one.
        multipliers: further fractions, as `FRACTIONS`.
        computes: config keys, and the values that llama.cpp computes, whatever a file says.
        leaves_out: tensors of the layer, by beginnings of their names, that only an idle shared expert has.
    """

    model_type: str
    architecture: str
    is_moe: bool
    is_interleaved: bool = False
    has_head_norms: bool = False
    is_square: bool = False
    groups_heads: bool = True
    biases: tuple[str, ...] = ()
    needs_head: bool = False
    experts_key: str = "num_local_experts"
    width_key: str = WIDTH
    shared_width: str | None = None
    multipliers: Mapping[str, str] = field(default_factory=dict)
    computes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    leaves_out: tuple[str, ...] = ()

    def names(self, layers: int, moe: Architecture | None) -> dict[str, str]:
        """Map the names of a checkpoint's tensors to those of GGUF, for all tensors but those of experts."""
        inside = _LAYER | {f"self_attn.{module}.bias": f"{_ATTENTION[module]}.bias" for module in self.biases}
        inside |= _HEAD_NORMS if self.has_head_norms else {}
        if moe is None:
            inside |= _DENSE
        else:
            inside[f"{moe.block}.{moe.router}"] = "ffn_gate_inp.weight"
            if self.shared_width == "shared_expert_intermediate_size":
                inside["mlp.shared_expert_gate.weight"] = "ffn_gate_inp_shexp.weight"
        return _OUTSIDE | {
            f"model.layers.{layer}.{name}": f"blk.{layer}.{own}"
            for layer in range(layers)
            for name, own in inside.items()
        }

    def turned_heads(self, name: str, heads: int, groups: int) -> int | None:
        """Heads whose rows lie in another order in a tensor of this (GGUF's) name; `None` if all lie as they were."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        return {"attn_q": heads, "attn_k": groups}.get(part) if self.is_interleaved else None


_RENORMALIZED: Mapping[str, tuple[object, ...]] = MappingProxyType({"norm_topk_prob": (True,)})
_NOT_RENORMALIZED: Mapping[str, tuple[object, ...]] = MappingProxyType({"norm_topk_prob": (False,)})
_QWEN2_MOE = GgufFamily(
    "qwen2_moe",
    "qwen2moe",
    is_moe=True,
    is_square=True,
    biases=_QKV,
    needs_head=True,
    experts_key="num_experts",
    width_key=EXPERT_WIDTH,
    shared_width="shared_expert_intermediate_size",
    computes=_NOT_RENORMALIZED,
)
# Routing weights that add up to one are beyond its own architecture. Less its shared expert, which moetool's upcycled
# models have idle, it is a Mixtral with biases.
_QWEN2_MOE_RENORMALIZED = GgufFamily(
    "qwen2_moe",
    "llama",
    is_moe=True,
    is_interleaved=True,
    biases=_QKV,
    leaves_out=("mlp.shared_expert.", "mlp.shared_expert_gate."),
)
GGUF_FAMILIES: tuple[GgufFamily, ...] = (
    GgufFamily("llama", "llama", is_moe=False, is_interleaved=True, biases=tuple(_ATTENTION)),
    GgufFamily("mistral", "llama", is_moe=False, is_interleaved=True),
    GgufFamily("qwen2", "qwen2", is_moe=False, is_square=True, biases=_QKV),
    GgufFamily("qwen3", "qwen3", is_moe=False, has_head_norms=True, biases=_QKV),
    GgufFamily("granite", "granite", is_moe=False, is_interleaved=True, biases=tuple(_ATTENTION), multipliers=_GRANITE),
    GgufFamily("mixtral", "llama", is_moe=True, is_interleaved=True),
    _QWEN2_MOE,
    GgufFamily(
        "qwen3_moe",
        "qwen3moe",
        is_moe=True,
        has_head_norms=True,
        biases=_QKV,
        experts_key="num_experts",
        width_key=EXPERT_WIDTH,
        computes=_RENORMALIZED,
    ),
    GgufFamily(
        "olmoe",
        "olmoe",
        is_moe=True,
        has_head_norms=True,
        is_square=True,
        groups_heads=False,
        needs_head=True,
        experts_key="num_experts",
        computes={**_NOT_RENORMALIZED, "clip_qkv": (None,)},
    ),
    GgufFamily(
        "granitemoe",
        "granitemoe",
        is_moe=True,
        is_interleaved=True,
        biases=tuple(_ATTENTION),
        multipliers=_GRANITE,
    ),
    GgufFamily(
        "granitemoeshared",
        "granitemoe",
        is_moe=True,
        is_interleaved=True,
        biases=tuple(_ATTENTION),
        shared_width="shared_intermediate_size",
        multipliers=_GRANITE,
    ),
)


def gguf_library() -> ModuleType:
    """The library `gguf`. Raises `UsageError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UsageError("GGUF needs the library gguf: pip install moetool[gguf].") from error
    return gguf


def gguf_family(config: Settings) -> GgufFamily:
    """The family of a model.

    Raises:
        InvalidInputError: llama.cpp does not know it, or not in this way.
    """
    model_type = config.get("model_type")
    if model_type == _QWEN2_MOE.model_type and config.get("norm_topk_prob"):
        return _QWEN2_MOE_RENORMALIZED
    for family in GGUF_FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in GGUF_FAMILIES)
    raise InvalidInputError(f"There is no GGUF of moetool's for {model_type!r}. There is for {known}.")


def family_in_file(architecture: str, *, is_moe: bool, has_shared: bool) -> GgufFamily:
    """The family of a GGUF file, by the name of its architecture. Raises `InvalidInputError` for one not known."""
    known = [family for family in GGUF_FAMILIES if family.architecture == architecture and family.is_moe == is_moe]
    if not known:
        names = ", ".join(sorted({family.architecture for family in GGUF_FAMILIES}))
        experts = " with experts" if is_moe else ""
        raise InvalidInputError(f"It holds a model of llama.cpp's '{architecture}'{experts}. moetool reads {names}.")
    return next((family for family in known if has_shared == (family.shared_width is not None)), known[0])


def layer_in_file(layer: int, name: str) -> str:
    """The name of a layer's tensor in a GGUF file, such as `blk.3.ffn_up_exps.weight`."""
    return f"blk.{layer}.{name}"


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows (or entries of a bias) `[heads · width, …]` with the halves of every head interleaved, as llama.cpp turns
    neighbours: its `LlamaModel.permute`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`: every head's even rows come first, then its odd ones."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def attention_heads(config: Mapping[str, object]) -> tuple[int, int]:
    """Number of attention heads for queries, and for keys and values, from a `config.json`."""
    heads = whole_number(config, "num_attention_heads") or 1
    return heads, whole_number(config, "num_key_value_heads") or heads
