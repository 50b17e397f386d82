"""The Granite-MoE family with a shared expert, whose output is added to that of the routed ones without a gate."""

from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets import granitemoe
from moetool.upcycle.targets.base import Target


def _entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    return {**granitemoe.entries(dense, spec), "shared_intermediate_size": dense.intermediate}


TARGET = Target(
    name="granitemoeshared",
    model_class="GraniteMoeSharedForCausalLM",
    entries=_entries,
    expresses=granitemoe.EXPRESSES | {"shared_half", "shared_on_base"},
    needs=frozenset({"shared_half"}),
    last_resort_for=granitemoe.TARGET.last_resort_for,
    completed_biases=granitemoe.TARGET.completed_biases,
)
