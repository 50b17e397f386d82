"""The windows that repair trains on, and those of each kind of text that decide what is kept."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.calibration.bundled import kinds
from moetool.calibration.data import BUNDLED
from moetool.calibration.windows import check_tokens, drawn_windows, load_tokenizer
from moetool.errors import UsageError
from moetool.job.job import Job
from moetool.job.own_text import own_text
from moetool.job.result import CalibrationFacts
from moetool.repair.options import RepairOptions
from moetool.repair.sources import RepairedSource


@dataclass(frozen=True)
class Texts:
    """Windows of tokens, int64 `[windows, length]`.

    Attributes:
        trained: to be trained on.
        held_out: others, by the text that they are of; all kinds of the bundled text together are one.
        facts: what was drawn.
    """

    trained: Tensor
    held_out: Mapping[str, Tensor]
    facts: CalibrationFacts

    @property
    def whole(self) -> Tensor:
        """All windows `[windows, length]`: first those that are trained on, then those held out, kind by kind."""
        return torch.cat([self.trained, *self.held_out.values()])


def draw_texts(job: Job[RepairedSource], options: RepairOptions) -> Texts:
    """Draw the windows of a job. Raises `UsageError` where the text is too short to hold any out."""
    assert options.calibration is not None
    tokenizer, settings = load_tokenizer(job.source.checkpoint.path), job.source.checkpoint.settings
    drawn = drawn_windows(
        options.calibration,
        tokenizer,
        samples=options.samples,
        more=2 * options.held_out,
        sequence_length=options.sequence_length,
        seed=options.seed,
        bos=options.bos,
        mix=options.mix,
        insist="mix" in options.model_fields_set,
        own=own_text(job, options),
    )
    for remark in drawn.remarks:
        job.progress.log(remark)
    bundled, held = set(kinds()), dict[str, list[Tensor]]()
    for number, name in enumerate(drawn.kinds):
        if len(own := drawn.others[drawn.others_of_kind == number]):
            held.setdefault(BUNDLED if name in bundled else name, []).append(own)
    if not held and "self" not in options.calibration:
        raise UsageError(
            f"The calibration text has no window of {options.sequence_length} tokens besides the {len(drawn.windows)} "
            "that are trained on, so that nothing could tell whether training helps. Give more text, shorter windows "
            "(--sequence-length) or fewer (--samples)."
        )
    if BUNDLED not in held:
        other = drawn_windows(
            BUNDLED,
            tokenizer,
            samples=options.held_out,
            more=0,
            sequence_length=options.sequence_length,
            seed=options.seed,
            bos=options.bos,
        )
        held[BUNDLED] = [other.windows]
    few = {name: torch.cat(parts)[: options.held_out] for name, parts in held.items()}
    for windows in (drawn.windows, *few.values()):
        check_tokens(windows, settings)
    told = ", ".join(f"{len(windows)} of {name}" for name, windows in few.items())
    job.progress.log(f"Training on {drawn.counts}; held out: {told}.")
    facts = CalibrationFacts(
        len(drawn.windows), drawn.windows.numel(), None, kinds=drawn.counts.by_kind, text=str(drawn.counts)
    )
    return Texts(drawn.windows, few, facts)
