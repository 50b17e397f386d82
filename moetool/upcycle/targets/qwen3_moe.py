"""The Qwen3-MoE family, to which Qwen3 models are upcycled."""

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target
from moetool.upcycle.targets.qwen2_moe import fine_grained


def _entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    used = "sliding_window" in dense.features
    return {
        **fine_grained(dense, spec),
        "attention_bias": "attention_bias" in dense.features,
        "use_sliding_window": used,
        "sliding_window": dense.config.sliding_window if used else None,
    }


TARGET = Target(
    name="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    entries=_entries,
    expresses=frozenset({"head_norm", "attention_bias", "dense_layers", "sliding_window", "head_dim"}),
    needs=frozenset({"head_norm"}),
)
