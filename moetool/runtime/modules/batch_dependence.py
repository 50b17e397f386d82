"""Detection of models whose result for a token depends on the other tokens of its batch."""

from torch import nn

from moetool.runtime.modules.experts import SharedBaseExperts

BATCH_DEPENDENT = (
    "Semi-dynamic pruning: every batch skips the channels of the base that are weakest over all of its tokens. Results "
    "thus depend on padding, on what else is in the batch and on later tokens, and generating with a cache differs "
    "from one pass over the same text. With --pruning static they do not."
)


def depends_on_batch(model: nn.Module) -> bool:
    """Whether a base of a loaded model is pruned semi-dynamically (D²-MoE, Eq. 9)."""
    return any(module.layout.dynamic_channels for module in model.modules() if isinstance(module, SharedBaseExperts))
