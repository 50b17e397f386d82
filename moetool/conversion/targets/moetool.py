"""moetool's own module: the source's model, with mixtures of its own feed-forward networks in the place of these."""

from typing import Any

from moetool.architectures.dense import FEATURES
from moetool.checkpoint.format import own_entry
from moetool.conversion.dense import DenseModel
from moetool.conversion.targets.base import Target
from moetool.representations.mixture import Mixture


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
