"""Families that llama.cpp computes, by the model type of a checkpoint and by the architecture of a GGUF file.

Every one was compared with transformers' logits in llama.cpp (`tests/integration/test_cli_gguf_families.py`).
"""

from collections.abc import Mapping

from moetool.architectures.base import Settings, experts_told
from moetool.errors import InvalidInputError
from moetool.format.gguf.before_llama import BEFORE_LLAMA
from moetool.format.gguf.beside_states import FALCON_H1
from moetool.format.gguf.compressed import OF_COMPRESSED
from moetool.format.gguf.dense import DENSE
from moetool.format.gguf.family import GgufFamily
from moetool.format.gguf.gemma4 import GEMMA4
from moetool.format.gguf.indexed import OF_INDEXED
from moetool.format.gguf.latent import OF_LATENT
from moetool.format.gguf.lightning import LIGHTNING
from moetool.format.gguf.limited import MINIMAX_M3_OF_HUB, OF_LIMITED
from moetool.format.gguf.mixed import MIXED
from moetool.format.gguf.recurrent import GRANITE_4_DENSE, RECURRENT
from moetool.format.gguf.seeing import SEEING
from moetool.format.gguf.sigmoid import OF_SIGMOID
from moetool.format.gguf.softmax import OF_SOFTMAX, QWEN2_MOE_RENORMALIZED
from moetool.format.gguf.streams import OF_STREAMS
from moetool.format.gguf.words import EXPERT_COUNT, SHARED_WIDTH, WINDOW

GGUF_FAMILIES: tuple[GgufFamily, ...] = (
    *DENSE,
    *BEFORE_LLAMA,
    *SEEING,
    *OF_SOFTMAX,
    *GEMMA4,
    *OF_LATENT,
    *OF_SIGMOID,
    *OF_LIMITED,
    *RECURRENT,
    FALCON_H1,
    *LIGHTNING,
    *MIXED,
    *OF_COMPRESSED,
    *OF_STREAMS,
    *OF_INDEXED,
)
# Families of which moetool reads files, too, as llama.cpp's converter and moetool write them.
READ = frozenset(
    [
        "afmoe", "apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "gemma", "gemma2", "gemma3_text",
        "gemma4_text", "glm", "glm4", "glm4_moe", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_oss", "granite",
        "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe", "llama", "llama4_text", "mellum", "minimax_m2", "ministral3", "mistral",
        "mistral4", "mixtral", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "sarvam_moe",
        "seed_oss", "smollm3", "stablelm", "starcoder2",
    ]
)  # fmt: skip
_REFUSED: Mapping[str, str] = {
    "hunyuan_vl_text": "llama.cpp turns queries and keys of this model by three of its four axes in a text, "
    "transformers by all of them. It would be another model.",
    "phimoe": "llama.cpp gives the two experts of a token weights that add up to one; this model's router "
    "(SparseMixer) gives nearly one to each. It would be another model.",
}


def gguf_family(config: Settings) -> GgufFamily:
    """The family of a model.

    Raises:
        InvalidInputError: llama.cpp does not know it, or not in this way.
    """
    model_type = config.get("model_type")
    if model_type == QWEN2_MOE_RENORMALIZED.model_type and config.get("norm_topk_prob"):
        return QWEN2_MOE_RENORMALIZED
    if model_type == MINIMAX_M3_OF_HUB.model_type and config.get("text_config"):
        return MINIMAX_M3_OF_HUB
    has_experts = _has_experts(config)
    if model_type == GRANITE_4_DENSE.model_type and not has_experts and _all_attend(config):
        return GRANITE_4_DENSE
    if known := [family for family in GGUF_FAMILIES if family.model_type == model_type]:
        return next((family for family in known if family.is_moe == has_experts), known[0])
    if (reason := _REFUSED.get(str(model_type))) is not None:
        raise InvalidInputError(reason)
    names = ", ".join(dict.fromkeys(family.model_type for family in GGUF_FAMILIES))
    raise InvalidInputError(f"There is no GGUF of moetool's for {model_type!r}. There is for {names}.")


def _has_experts(config: Settings) -> bool:
    """Whether a config speaks of experts, unless it says what each layer has and names none (Nemotron-H)."""
    kinds = config.get("layers_block_type")
    names_none = isinstance(kinds, list) and "mlp" in kinds and "moe" not in kinds
    return experts_told(config) is not None and not names_none


def _all_attend(config: Settings) -> bool:
    """Whether a config says of every layer that it has attention."""
    kinds = config.get("layer_types")
    return isinstance(kinds, list) and set(kinds) <= {"attention", "full_attention"}


def family_in_file(architecture: str, entries: Mapping[str, object]) -> GgufFamily:
    """The family of a GGUF file, by the name of its architecture and by its metadata, by keys without that name: of
    several, the first with which fewest metadata are at odds. Raises `InvalidInputError` for one not known."""
    experts = entries.get(EXPERT_COUNT) or 0
    read = [family for family in GGUF_FAMILIES if family.model_type in READ]
    named = [family for family in read if family.architecture == architecture]
    known = [family for family in named if family.is_moe == bool(experts)]
    if experts == 1:  # as files of Jamba without experts say
        known = [family for family in named if not family.is_moe] or known
    if not known:
        names = ", ".join(sorted({family.architecture for family in read}))
        kind = " with experts" if experts else ""
        raise InvalidInputError(f"It holds a model of llama.cpp's '{architecture}'{kind}. moetool reads {names}.")

    def at_odds(family: GgufFamily) -> int:
        has_shared, has_windows = family.shared_width is not None, family.window_period is not None
        other = (own in entries and entries[own] != known for own, known in family.fixed.items())
        shared, windows = bool(entries.get(SHARED_WIDTH)), bool(entries.get(WINDOW))
        return sum((shared != has_shared, windows != has_windows, *other))

    return min(known, key=at_odds)
