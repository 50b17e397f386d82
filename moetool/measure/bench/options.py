"""Options of `moetool bench`: lengths, batches, rounds, and what to compare with."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.job.options import context_length
from moetool.measure.options import PagedOptions
from moetool.runtime.synthesis import Synthesis


def _split(value: object) -> object:
    """`1,8` → [1, 8]; anything but text passes through."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return parts
    words = [word.strip() for part in parts for word in part.split(",")]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError("write whole numbers above 0, with commas between them")
    return [int(word) for word in words]


Numbers = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_split), Field(min_length=1)]


class BenchOptions(PagedOptions):
    """Options of `bench`: models, batch sizes, lengths, repetitions."""

    against: str | None = Field(None, description="Another model, timed in turns with this one; ratios are to it.")
    batch: Numbers = Field((1, 8), description="Prompts at a time [default: 1,8].")
    lengths: Numbers = Field((128, 512), description="Tokens per prompt [default: 128,512, as far as the model goes].")
    new_tokens: int = Field(
        32, ge=0, description="Tokens to generate after a prompt; 0: the prompt alone, as encoders have it."
    )
    rounds: int = Field(5, ge=1, description="Times to take, of which the median counts, after one that does not.")
    threads: int | None = Field(None, ge=1, description="Of the processor [default: as torch has it].")
    synthesize: Synthesis = Field(
        "auto",
        description="Make a compressed model's experts dense when it is loaded or as they run (auto: as `generate` "
        "does, or without new tokens as `eval` does).",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of the random token ids.")


def fit_lengths(options: BenchOptions, *checkpoints: Checkpoint) -> BenchOptions:
    """Leave out lengths that the models have no positions for, unless they were asked for.

    Raises:
        UsageError: they were.
    """
    contexts = {str(own.path): context for own in checkpoints if (context := context_length(own.settings)) is not None}
    if not contexts:
        return options
    path, most = min(contexts.items(), key=lambda item: item[1])
    new = options.new_tokens
    if max(options.lengths) + new <= most:
        return options
    if "lengths" in options.model_fields_set or most <= new:
        after = f" and {new} new ones" if new else ""
        longest = max(options.lengths)
        raise UsageError(f"--lengths {longest}: {longest} tokens{after} are more than the {most} positions of {path}.")
    lengths = tuple(length for length in options.lengths if length + new <= most) or (most - new,)
    return options.model_copy(update={"lengths": lengths})
