"""The FlexOlmo family, to which OLMo 2 models are upcycled."""

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target, common


def _entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    return {
        **common(dense),
        "intermediate_size": spec.intermediate,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": True,
        "attention_bias": "attention_bias" in dense.features,
        "router_aux_loss_coef": 0.01,
    }


TARGET = Target(
    name="flex_olmo",
    model_class="FlexOlmoForCausalLM",
    entries=_entries,
    expresses=frozenset({"query_norm", "attention_bias"}),
    needs=frozenset({"query_norm"}),
)
