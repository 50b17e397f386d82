"""A model in training towards another's predictions."""

from collections.abc import Mapping

from torch import Tensor

from moetool.calibration.blocks import OUTSIDE
from moetool.training.changed import ChangedModel
from moetool.training.masters import Master, WeightChange
from moetool.training.weights import ModelWeights


class Trainee(ChangedModel):
    """A model in evaluation mode that computes with what its masters give: dropout and jitter of routers are not in the
    predictions to be met.

    Attributes:
        masters: by name of their parameters.
    """

    def __init__(self, weights: ModelWeights, masters: Mapping[str, Master]) -> None:
        changes = {name: master for name, master in masters.items() if isinstance(master, WeightChange)}
        super().__init__(weights, changes, masters)
        self.masters = masters

    def logits(self, windows: Tensor) -> Tensor:
        """Predictions `[windows, length, vocabulary]` of the tokens after those of `windows` `[windows, length]`."""
        with self.opened(OUTSIDE):
            found: Tensor = self.model(input_ids=windows.to(self.model.device), use_cache=False).logits
            return found
