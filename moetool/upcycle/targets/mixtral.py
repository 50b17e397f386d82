"""The Mixtral family, which most engines know, for every model that is a plain Llama or Mistral."""

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target, common


def _entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    return {
        **common(dense),
        "intermediate_size": spec.intermediate,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "sliding_window": dense.config.sliding_window if "sliding_window" in dense.features else None,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
    }


TARGET = Target(
    name="mixtral",
    model_class="MixtralForCausalLM",
    entries=_entries,
    expresses=frozenset({"sliding_window", "head_dim"}),
)
