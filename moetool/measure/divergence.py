"""Divergence of a model's predictions from an original's, exactly and in bounded memory.

The original comes first. Where both fit in memory, it stays and runs beside the model, batch by batch; elsewhere its
logits go to a temporary file, as the dtype in which it computed them, and it is gone before the model is loaded.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import torch
from torch import Tensor

from moetool.architectures.base import whole_number
from moetool.calibration.comparable import check_comparable, difference_in_shape
from moetool.calibration.opening import Tokenizer
from moetool.checkpoint.files import storage_errors
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import ResourceError, VerificationError
from moetool.job.progress import Progress, phase
from moetool.measure.loading import both_fit, computed_in, load_for
from moetool.measure.options import LoadedOptions
from moetool.measure.predictions import Predictions, exp_loss, prediction_losses
from moetool.measure.results import Divergence
from moetool.numerics.divergence import divergence

POSITIONS = 256  # whose distributions are compared at once, in fp64

Batches: TypeAlias = Sequence[Tensor]
# The number of a batch → the original's logits of it `[batch, positions, vocabulary]`.
Reference: TypeAlias = Callable[[int], Tensor]
Noted: TypeAlias = tuple[int, torch.Size, torch.dtype]  # where in the file logits begin, and what they are


@torch.inference_mode()
def compared(original: Tensor, logits: Tensor) -> tuple[float, int]:
    """`Σ KL(original ‖ model)` in nats over all positions, and at how many both find the same token likeliest.

    Args:
        original: `[batch, positions, vocabulary]`, of any dtype; in fp64 from here on.
        logits: the model's, the same.
    """
    kl, same = 0.0, 0
    pairs = zip(original.flatten(0, 1).split(POSITIONS), logits.flatten(0, 1).split(POSITIONS), strict=True)
    for ours, theirs in pairs:
        ours = ours.to(theirs.device)
        p, q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        kl += divergence(p, q).sum().item()
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return kl, same


class _Batch(NamedTuple):
    """Losses and divergences of both models on one batch.

    Attributes:
        losses, own: of the model and of the original, `[windows]` fp64.
        kl: sum over its predictions.
        same: at how many of them both find the same token likeliest.
        predictions: how many there are.
    """

    losses: Tensor
    own: Tensor
    kl: float
    same: int
    predictions: int


class AgainstOriginal:
    """Two models on the batches of one or several texts; `told` says what came of them.

    Args:
        model: the original, as it was given.
        asked: what both are asked.
        reference: its logits of every batch.
        unrelated: sentence that says how both differ in shape, if they do.

    Attributes:
        unrelated: the same.
    """

    def __init__(self, model: str, asked: Predictions, reference: Reference, unrelated: str | None) -> None:
        self.unrelated = unrelated
        self._model, self._asked, self._reference = model, asked, reference
        self._batches: list[_Batch] = []

    def add(self, number: int, windows: Tensor, logits: Tensor, losses: Tensor) -> None:
        """Batch `number` of the texts, the model's logits of it and its losses; in order. Raises `VerificationError`
        where the original's are no numbers."""
        original = self._reference(number)
        own = prediction_losses(original, self._asked.targets(windows))
        if not own.isfinite().all():
            raise VerificationError(f"{self._model} gives a loss of {own.mean().item()}: its weights are damaged.")
        kl, same = compared(original, logits)
        self._batches.append(_Batch(losses, own, kl, same, logits.shape[0] * logits.shape[1]))

    def divergence(self, batches: slice = slice(None)) -> Divergence:
        """Summarize how predictions differ from the original's over some batches, by default over all."""
        found = self._batches[batches]
        losses, own = (torch.cat([getattr(batch, name) for batch in found]) for name in ("losses", "own"))
        deltas, nll = losses - own, own.mean().item()
        predictions = sum(batch.predictions for batch in found)
        return Divergence(
            model=self._model,
            perplexity=exp_loss(nll),
            nll=nll,
            excess=deltas.mean().item(),
            excess_error=deltas.std().item() / math.sqrt(len(deltas)) if len(deltas) > 1 else None,
            kl=sum(batch.kl for batch in found) / predictions,
            agreement=sum(batch.same for batch in found) / predictions,
        )


@contextmanager
def original_beside(
    path: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    batches: Batches,
    asked: Predictions,
    options: LoadedOptions,
    progress: Progress,
) -> Iterator[AgainstOriginal]:
    """The original at `path`, to compare with the model in `checkpoint`, which is loaded inside the `with` block.

    Args:
        path: of the original.
        checkpoint: of the model.
        tokenizer: the model's.
        batches: windows of tokens `[batch, length]`.
        asked: what both are asked.
        options: how models are loaded.
        progress: told what is kept where.

    Raises:
        UsageError: one is an encoder, and the other is not.
        InvalidInputError: their vocabularies are not the same.
        ResourceError: the original does not fit in memory, or its logits not on the disk.
    """
    original = Checkpoint.open(path)
    check_comparable(original, checkpoint, tokenizer)
    unrelated = difference_in_shape(original, checkpoint)
    if both_fit(original, checkpoint, options.device, options.compute_dtype):
        model = load_for(original, options.device, options.compute_dtype, progress)
        yield AgainstOriginal(path, asked, lambda number: asked.logits(model, batches[number]), unrelated)
        return
    place = Path(tempfile.gettempdir())
    predictions = sum(asked.targets(rows).numel() for rows in batches)
    _check_room(original, predictions, computed_in(original, options.device, options.compute_dtype), place, progress)
    with tempfile.TemporaryFile(dir=place) as file:
        noted = _note_all(file, place, original, batches, asked, options, progress)
        yield AgainstOriginal(path, asked, lambda number: _read(file, *noted[number]), unrelated)


def _check_room(original: Checkpoint, predictions: int, dtype: torch.dtype, place: Path, progress: Progress) -> None:
    """Say what the original's logits take on the disk. Raises `ResourceError` if that is more than there is."""
    vocabulary = whole_number(original.settings, "vocab_size") or 0
    needed = predictions * vocabulary * dtype.itemsize
    size, free = format_bytes(needed), shutil.disk_usage(place).free
    progress.log(f"Both models do not fit in memory: the logits of {original.source} wait in {place}, {size}.")
    if needed > free:
        raise ResourceError(
            f"The logits of {original.source} take {size} of disk in {place}, which has {format_bytes(free)} free. "
            "Evaluate fewer windows (--windows), or set TMPDIR to a place with room."
        )


def _note_all(
    file: BinaryIO,
    place: Path,
    original: Checkpoint,
    batches: Batches,
    asked: Predictions,
    options: LoadedOptions,
    progress: Progress,
) -> list[Noted]:
    """Write the logits of every batch, and let go of the model."""
    model = load_for(original, options.device, options.compute_dtype, progress)
    with phase(progress, "Original", len(batches), "batches of windows"):
        return [_note(file, place, asked.logits(model, rows), progress) for rows in batches]


def _note(file: BinaryIO, place: Path, logits: Tensor, progress: Progress) -> Noted:
    start, plain = file.tell(), logits.cpu().contiguous()
    with storage_errors(place):
        file.write(plain.view(torch.uint8).numpy().tobytes())
    progress.advance()
    return start, plain.shape, plain.dtype


def _read(file: BinaryIO, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    file.seek(start)
    return torch.frombuffer(bytearray(file.read(shape.numel() * dtype.itemsize)), dtype=dtype).view(shape)
