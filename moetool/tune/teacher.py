"""A teacher: another model, whose predictions of the answers are learnt beside the text (distillation,
arXiv:1503.02531, at temperature 1)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import VerificationError
from moetool.numerics.divergence import divergence
from moetool.runtime.loading import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Teacher:
    """A model that another learns from.

    Attributes:
        model: in evaluation mode; it does not change.
        name: as it was given.
        share: of the loss that is the divergence from its predictions.
    """

    model: "PreTrainedModel"
    name: str
    share: float

    @classmethod
    def of(cls, teacher: Checkpoint, share: float, device: torch.device) -> "Teacher":
        """Load a teacher in fp32. Raises as `load_model`."""
        model = load_model(teacher, torch.float32, device).requires_grad_(False)
        return cls(model, str(teacher.path), share)

    def divergence(self, given: dict[str, Tensor], logits: Tensor, learnt: Tensor) -> Tensor:
        """KL divergence in nats from the teacher's predictions, summed over the tokens that are learnt.

        Args:
            given: what the student was given, `input_ids` and `position_ids` `[rows, tokens]`.
            logits: the student's `[rows, tokens, vocabulary]`.
            learnt: `[rows, tokens - 1]` bool, whether a token's successor is learnt.

        Raises:
            VerificationError: the teacher's predictions are no numbers.
        """
        with torch.no_grad():
            told = self.model(**given, use_cache=False).logits[:, :-1][learnt].float().log_softmax(-1)
        if not told.isfinite().all():
            raise VerificationError(f"{self.name} predicts what is no number: its weights are damaged.")
        return divergence(told, logits[:, :-1][learnt].float().log_softmax(-1)).sum()
