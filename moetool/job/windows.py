"""The windows of a job's calibration text: those that it measures on, and others that are held out."""

from torch import Tensor

from moetool.architectures.dense import is_encoder
from moetool.calibration.opening import Bos
from moetool.calibration.windows import DrawnWindows, OwnText, check_tokens, drawn_windows, load_tokenizer
from moetool.errors import UsageError
from moetool.job.job import Input
from moetool.job.options import TextOptions
from moetool.job.own_text import blank_text


def calibration_windows(source: Input, options: TextOptions, own: OwnText) -> Tensor:
    """The calibration set `[samples, sequence_length]` of token ids, with what `own` gives for the model's own text.

    Raises:
        UsageError: no text given.
        InvalidInputError: text or tokenizer cannot be used.
    """
    return drawn_for(source, options, 0, own).windows


def held_out(source: Input, options: TextOptions, count: int) -> Tensor:
    """Draw windows `[count, sequence_length]` of the calibration text that are not in the calibration set.

    Raises:
        UsageError: no text given, or too little of it.
        InvalidInputError: text or tokenizer cannot be used.
    """
    windows = drawn_for(source, options, count, blank_text).others
    if len(windows) < count:
        raise UsageError(
            f"The calibration text has {len(windows)} windows of {options.sequence_length} tokens besides the "
            f"{options.samples} that are measured on, and {count} are to be held out. Give more text, shorter windows "
            "(--sequence-length), or fewer of either (--samples, --held-out)."
        )
    return windows


def drawn_for(source: Input, options: TextOptions, more: int, own: OwnText) -> DrawnWindows:
    """Draw the calibration set, and so many windows `more`, or as many as there are."""
    if options.calibration is None:
        raise UsageError("Give a calibration text: --calibration FILE.")
    drawn = drawn_windows(
        options.calibration,
        load_tokenizer(source.checkpoint.path),
        samples=options.samples,
        more=more,
        sequence_length=options.sequence_length,
        seed=options.seed,
        bos=bos_of(source, options),
        mix=options.mix,
        insist="mix" in options.model_fields_set,
        own=own,
    )
    for windows in (drawn.windows, drawn.others):
        check_tokens(windows, source.checkpoint.settings)
    return drawn


def bos_of(source: Input, options: TextOptions) -> Bos:
    """Whether windows begin with the tokenizer's BOS token, which an encoder's never do."""
    return "never" if is_encoder(source.checkpoint.config) else options.bos
