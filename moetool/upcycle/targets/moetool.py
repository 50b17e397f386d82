"""A custom module: the source's model, with MoE layers of its own feed-forward networks in the place of these."""

from moetool.architectures.dense import FEATURES
from moetool.format.entry import custom_entry
from moetool.format.kinds.moe import MoESpec
from moetool.runtime.dense import DenseModel
from moetool.upcycle.targets.base import Target


def _entries(dense: DenseModel, spec: MoESpec) -> dict[str, object]:
    return {"quantization_config": custom_entry(spec)}


TARGET = Target(
    name="moetool",
    model_class="",
    entries=_entries,
    expresses=frozenset(FEATURES),
    needs=frozenset(),
)
