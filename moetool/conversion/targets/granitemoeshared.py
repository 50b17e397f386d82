"""Granite-MoE with a shared expert, which is simply added."""

from typing import Any

from moetool.architectures.granitemoeshared import ARCHITECTURE
from moetool.conversion.dense import DenseModel
from moetool.conversion.targets import granitemoe
from moetool.conversion.targets.base import Target
from moetool.representations.mixture import Mixture


def _entries(dense: DenseModel, mixture: Mixture) -> dict[str, Any]:
    return {**granitemoe.entries(dense, mixture), "shared_intermediate_size": dense.intermediate}


TARGET = Target(
    name="granitemoeshared",
    architecture=ARCHITECTURE,
    model_class="GraniteMoeSharedForCausalLM",
    entries=_entries,
    expresses=granitemoe.EXPRESSES | {"shared_half", "shared_on_base"},
    needs=frozenset({"shared_half"}),
    last_resort_for=granitemoe.TARGET.last_resort_for,
    completed_biases=granitemoe.TARGET.completed_biases,
)
