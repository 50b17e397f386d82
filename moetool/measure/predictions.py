"""Prediction tasks on a text: the next token, or for an encoder the tokens that a mask hides."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures.dense import is_encoder
from moetool.calibration.masking import mask_token
from moetool.calibration.opening import Tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.job.options import OptionsT, fit_context
from moetool.kernels.rounding import exact_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NextTokens:
    """Prediction of every token but the first of windows `[batch, length]`, each from those before it."""

    @torch.inference_mode()
    @exact_products()
    def logits(self, model: "PreTrainedModel", windows: Tensor) -> Tensor:
        """Logits of every next token, `[batch, length − 1, vocabulary]`."""
        logits: Tensor = model(input_ids=windows.to(model.device), use_cache=False).logits[:, :-1]
        return logits

    def targets(self, windows: Tensor) -> Tensor:
        """The true next tokens `[batch, length − 1]` of windows `[batch, length]`."""
        return windows[:, 1:]


@dataclass(frozen=True)
class HiddenTokens:
    """Every token, given all the others: hidden once, alone, between the tokenizer's own marks of beginning and end, by
    as many runs as there are tokens.

    Attributes:
        tokenizer: has a mask token.
        rows: runs in one batch.
    """

    tokenizer: Tokenizer
    rows: int

    @torch.inference_mode()
    @exact_products()
    def logits(self, model: "PreTrainedModel", windows: Tensor) -> Tensor:
        """`[batch, length, vocabulary]`. Raises `InvalidInputError` if the tokenizer has no mask token."""
        mask, (before, after) = mask_token(self.tokenizer), marks(self.tokenizer)
        return torch.stack([self._hidden(model, mask, [*before, *row.tolist(), *after], len(before), len(row))
                            for row in windows])  # fmt: skip

    def _hidden(self, model: "PreTrainedModel", mask: int, ids: list[int], begin: int, length: int) -> Tensor:
        framed, found = torch.tensor(ids, device=model.device), []
        for places in (begin + torch.arange(length, device=model.device)).split(self.rows):
            index = torch.arange(len(places), device=model.device)
            runs = framed.expand(len(places), -1).clone()
            runs[index, places] = mask
            found.append(model(input_ids=runs).logits[index, places])
        return torch.cat(found)

    def targets(self, windows: Tensor) -> Tensor:
        """All tokens of the windows: each is hidden and predicted once."""
        return windows


Predictions: TypeAlias = NextTokens | HiddenTokens


def marks(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the tokens that the tokenizer puts before and after a text."""
    before, after = ([] if mark is None else [mark] for mark in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return before, after


def fitted(options: OptionsT, checkpoint: Checkpoint, tokenizer: Tokenizer) -> OptionsT:
    """Options of a text with windows that fit the model's context; of an encoder between the tokenizer's marks, which
    are all that it begins with.

    Raises:
        UsageError: as `fit_context`.
    """
    if not is_encoder(checkpoint.config):
        return fit_context(options, checkpoint.settings)
    shorter = fit_context(options, checkpoint.settings, sum(map(len, marks(tokenizer))))
    return shorter.model_copy(update={"bos": "never"})


@torch.inference_mode()
def prediction_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of `−log p(target)` of each window, from logits `[batch, predictions, vocabulary]`: `[batch]` fp64."""
    pairs = zip(logits, targets.to(logits.device), strict=True)
    return torch.stack([F.cross_entropy(row.float(), target) for row, target in pairs]).double().cpu()


def exp_loss(nll: float) -> float:
    """Perplexity of a mean loss in nats; infinite where it would be beyond what a float holds."""
    return math.exp(nll) if nll < 700 else math.inf


def window_loss(model: "PreTrainedModel", windows: Tensor, asked: Predictions | None = None) -> Tensor:
    """Mean loss of what is `asked`, by default next tokens, of each window `[batch, length]`: `[batch]` fp64."""
    asked = asked or NextTokens()
    return prediction_losses(asked.logits(model, windows), asked.targets(windows))
