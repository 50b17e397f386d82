"""moetool's own module: the source's model, with mixtures of its own feed-forward networks in the place of these."""

from typing import Any

from moetool.architectures.dense import FEATURES
from moetool.format.entry import own_entry
from moetool.format.moe_spec import Mixture
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target


def _entries(dense: DenseModel, mixture: Mixture) -> dict[str, Any]:
    network = {"hidden": dense.hidden, "roles": list(dense.architecture.roles), "biases": list(dense.biases)}
    return {"quantization_config": own_entry("mixture", {**mixture.to_config(), "of": mixture.of, **network})}


TARGET = Target(
    name="moetool",
    architecture=None,
    model_class="",
    entries=_entries,
    expresses=frozenset(FEATURES) - {"spread"},
    needs=frozenset(),
)
