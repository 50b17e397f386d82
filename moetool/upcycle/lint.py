"""Warnings for models that other engines refuse or compute wrongly: vLLM 0.33.0, llama.cpp of October 2026.

transformers runs all of it, some only as it is told. A rule is listed if an engine refuses a model, or, worse, computes
something else.
"""

from collections.abc import Mapping

from moetool.format.kinds.moe import MoESpec
from moetool.format.marker import moetool_entry
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets import Target

_GRANITE = ("granitemoe", "granitemoeshared")
_QWEN = ("qwen2_moe", "qwen3_moe")
_BYTES = 16  # of which rows have to be multiples for a product of many matrices


def lint(target: Target, dense: DenseModel, spec: MoESpec, config: Mapping[str, object]) -> list[str]:
    """Warnings about what vLLM or llama.cpp cannot express, or transformers not by itself, a sentence each."""
    name, features = target.name, dense.features
    if name == "moetool":
        return ["only transformers runs moetool's custom MoE layers, after `import moetool`"]
    notes = []

    def note(condition: object, text: str) -> None:
        if condition:
            notes.append(text)

    note(
        moetool_entry(config) is not None,
        "only transformers runs deltas, after `import moetool`; `moetool export` writes experts in full",
    )
    widths = (spec.hidden, spec.intermediate)
    in_fp32, in_16_bits = (any(size * width % _BYTES for width in widths) for size in (4, 2))
    note(
        moetool_entry(config) is None and in_16_bits,
        f"experts take {spec.hidden} numbers to {spec.intermediate}, not both multiples of {4 if in_fp32 else 8}: "
        f"transformers refuses to run them in {'32 bits or less' if in_fp32 else '16 bits'} without "
        "experts_implementation='eager'; moetool's commands do not",
    )
    note(name == "flex_olmo", "llama.cpp does not know flex_olmo; older vLLM ignores norm_topk_prob for it")
    note(
        name == "qwen2_moe" and spec.shared != "med",
        "llama.cpp never renormalizes the routing of qwen2_moe and would scale the experts' output down",
    )
    note(
        name == "qwen2_moe" and spec.shared == "none",
        "qwen2_moe always has a shared expert: this one is narrow, and its output is zero. To have the model in "
        "llama.cpp, leave it so: moetool tune --train experts",
    )
    note(
        name in _QWEN and spec.dense_layers,
        f"llama.cpp cannot convert {name} with dense layers among those with experts",
    )
    note(
        name == "qwen2_moe" and config.get("tie_word_embeddings") and "lm_head.weight" not in dense.checkpoint.tensors,
        "llama.cpp does not load qwen2_moe with tied embeddings",
    )
    note(
        "head_dim" in features and name in (*_GRANITE, "qwen2_moe"),
        f"vLLM and llama.cpp ignore head_dim in {name} and do not load this model",
    )
    biases = "attention_bias" in features or "qkv_bias" in features
    note(biases and name in _GRANITE, f"vLLM silently drops the attention's biases of {name}; llama.cpp has them")
    note(
        "attention_bias" in features and name == "qwen3_moe",
        "vLLM silently drops the bias of the attention's output; llama.cpp does not load it",
    )
    activation = config.get("hidden_act")
    note(
        activation not in ("silu", "swish"),
        f"vLLM and llama.cpp have SiLU built into {name} and would run it instead of {activation}, or refuse",
    )
    windows = "sliding_window" in features or "mixed_attention" in features
    note(
        windows and name in ("mixtral", *_QWEN),
        f"llama.cpp ignores the sliding window of {name}: beyond {config.get('sliding_window')} tokens it differs",
    )
    note("mixed_attention" in features and name == "qwen2_moe", "vLLM ignores windows in some layers of qwen2_moe")
    note(
        spec.intermediate % 256,
        f"experts are {spec.intermediate} wide, no multiple of 256: llama.cpp's K-quants fall back to larger types",
    )
    note(
        spec.hidden % 256,
        f"hidden states are {spec.hidden} wide, no multiple of 256: llama.cpp's K-quants fall back to larger types",
    )
    return notes
