"""Options that many commands share, as frozen pydantic models. Command line and YAML are both generated from these."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from moetool.architectures.base import Settings
from moetool.calibration.data import BUNDLED, parse_data
from moetool.calibration.mixing import MixedSources
from moetool.calibration.opening import BOS_HELP, Bos
from moetool.checkpoint.sizes import (
    ByteSize,
    Ratio,
    WindowShare,
    format_bytes,
    format_least_bytes,
    format_most_share,
)
from moetool.checkpoint.source import is_here
from moetool.errors import UsageError, option_of
from moetool.representations.quantized import ROW_BITS, WHOLE

INCLUDED = ("attention", "embeddings")
INCLUDE_HELP = (
    "Also store in 8 bits: attention (its projections), embeddings (of tokens, and the head), or both, with a comma; "
    "attention:6 and embeddings:5 in 6 and 5 bits. --ratio and --size still mean all weight files: what this saves "
    "goes to the experts."
)
NO_TEXT = "none"  # as a calibration text, where nothing of that name is on the disk
TEXTS = (  # as the help says it
    "a .txt, .jsonl or .parquet file, a folder of them, a hub data set name[:config[:split[:column]]], "
    "bundled[:KIND] (text that comes with moetool) or self[:TEMPERATURE] (text that the model writes); several with "
    "commas"
)


def split_names(value: object) -> object:
    """`a,b` → [a, b], and the same of every entry of a list; anything but text passes through."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return parts
    return [word for part in parts for word in (_words(part) if isinstance(part, str) else [part])]


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError("write names or numbers with commas between them")
    return words


def joined(value: object) -> object:
    """[a, b] → `a,b`: what an option that takes a list with commas is when it is given several times, or a list in a
    preset; anything but a list of text or whole numbers passes through."""
    if not isinstance(value, list | tuple) or not value or any(type(part) not in (str, int) for part in value):
        return value
    return ",".join(map(str, value))


Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]
Listed = Annotated[str, BeforeValidator(joined)]  # a list with commas that something else takes apart


class Options(BaseModel):
    """Base of every set of options: frozen, strict about names, and with finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    alternatives: ClassVar[tuple[str, ...]] = ()  # one is to be given, and if typed replaces the others of a preset

    @model_validator(mode="after")
    def _one_alternative(self) -> Self:
        flags = {name: option_of(name) for name in self.alternatives}
        given = [flag for name, flag in flags.items() if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them.")
        if flags and not given:
            *first, last = flags.values()
            raise ValueError(f"Give one of {', '.join(first)} or {last}.")
        return self


class TextOptions(Options):
    """Options that name the calibration text and how much of it is read."""

    group: ClassVar[str] = "Calibration"  # of the help

    calibration: Listed | None = Field(
        None, description=f"Calibration text: {TEXTS} [default: bundled, where a text is needed]."
    )
    samples: int = Field(128, ge=1, description="Windows of calibration text.")
    mix: WindowShare = Field(
        0.5, description="Share of the windows that is bundled text where --calibration names another text."
    )
    sequence_length: int = Field(2048, ge=2, description="Tokens per window; by default no more than the context.")
    bos: Bos = Field("auto", description=BOS_HELP)
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random.")

    @model_validator(mode="after")
    def _mixed_with_something(self) -> Self:
        if "mix" in self.model_fields_set and self.calibration is None:
            raise ValueError(
                "--mix is the share of bundled text beside a text of yours: name that with --calibration, or leave out "
                "--mix, and all windows are bundled text"
            )
        if "mix" in self.model_fields_set and self.mix and (named := self._mixing_already):
            raise ValueError(
                f"--calibration names {named}, beside which --mix adds nothing: leave it out, and weigh the texts by "
                f"@WEIGHT (my-text.txt@3,{BUNDLED}@1)"
            )
        return self

    @property
    def _mixing_already(self) -> str | None:
        """The text among those named that has many kinds, so that nothing is mixed in; `None` if there is none."""
        specs = () if self.calibration is None else parse_data(self.calibration)
        return next((repr(spec.source) for spec in specs if spec.is_bundled or spec.is_self), None)

    @property
    def sources(self) -> MixedSources | None:
        """The texts, and how many windows are due of each; `None` where none is named. Raises as `parse_data`."""
        if self.calibration is None:
            return None
        return MixedSources.of(parse_data(self.calibration), self.samples, self.mix)


class CalibrationOptions(TextOptions):
    """Calibration options of methods that take gradients, beside those that name the text."""

    group: ClassVar[str] = "Calibration"

    gradient_samples: int = Field(
        128, ge=1, description="How many of these windows gradients are taken on; all, if there are no more."
    )
    labels: Literal["true", "sampled"] = Field(
        "true",
        description="Gradients of the loss on the true next token, by which text counts for more that the model "
        "foresees less, or on one drawn from the model's prediction.",
    )


def bits_of_included(names: Iterable[str]) -> dict[str, int]:
    """Bits of each kind of matrices beside the experts that is to be quantized, by names such as `attention` (8 bits)
    or `attention:6`. Raises `ValueError` for other names, and for a kind in two numbers of bits."""
    found: dict[str, int] = {}
    for name in names:
        kind, _, bits = name.partition(":")
        if kind not in INCLUDED:
            raise ValueError(f"there is {' and '.join(INCLUDED)}, or both with a comma, not {name!r}")
        if ":" in name and bits not in map(str, ROW_BITS):
            raise ValueError(f"{kind} can have {', '.join(map(str, ROW_BITS))} bits, not {bits!r}")
        chosen = int(bits) if bits else WHOLE
        if found.setdefault(kind, chosen) != chosen:
            raise ValueError(f"{kind} is given twice, in {found[kind]} and in {chosen} bits")
    return found


def names_of_included(bits: Mapping[str, int]) -> tuple[str, ...]:
    """Inverse of `bits_of_included`, with the kinds in the order of `INCLUDED`."""
    return tuple(kind if bits[kind] == WHOLE else f"{kind}:{bits[kind]}" for kind in INCLUDED if kind in bits)


class IncludeOptions(Options):
    """Option that quantizes weights beside the experts: attention, embeddings, or both."""

    include: Names | None = Field((), description=INCLUDE_HELP)

    @field_validator("include")
    @classmethod
    def _known(cls, include: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if include is None or include == ("none",):
            return None if include is None else ()
        return names_of_included(bits_of_included(include))


class KeepOptions(Options):
    """Option for what a job passes on of a source that another tool has quantized."""

    keep_stored: bool = Field(
        True,
        description="Leave attention, embeddings and all else that the method does not touch in the bits of a "
        "quantized INPUT (FP8, int4 …); else write it in the model's dtype.",
    )


class SizeOptions(Options):
    """Options that set the size of the output's weight files, as a share to save or in bytes."""

    alternatives: ClassVar[tuple[str, ...]] = ("ratio", "size")

    ratio: Ratio | None = Field(
        None, description="Share of the weight files' bytes to save: 0.8 or 80% makes them 80 % smaller."
    )
    size: ByteSize | None = Field(None, description="Instead of --ratio: largest size of the weight files, e.g. 20GB.")

    @property
    def target_option(self) -> str:
        """The option that says how small the weight files are to be, as typed: `--ratio 0.4` or `--size 20.0 GB`."""
        return f"--ratio {self.ratio:g}" if self.size is None else f"--size {format_bytes(self.size)}"

    def target_limits(self, least: int, original: int, present: int | None = None) -> str:
        """What the option that was typed can be, as a clause, where weight files that once had `original` bytes can
        have `least` bytes, and have `present` bytes now (`original` by default)."""
        now = original if present is None else min(present, original)
        if self.size is not None:
            most = f" and at most {format_bytes(now)}" if now < original else ""
            return f"--size must be at least {format_least_bytes(least)}{most}"
        above = math.ceil((1 - now / original) * 1000) / 1000
        return f"--ratio must be above {above:g} and at most {format_most_share(1 - least / original)}"


class RunOptions(Options):
    """Options on where and how a job runs. None of these changes what is computed, except the compute dtype."""

    group: ClassVar[str] = "Machine"

    device: str = Field("auto", description="cpu, cuda, cuda:1 … (auto: CUDA when there is a card).")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="For running the model (auto: float32 on CPU, the checkpoint's own on a card; for gradients not "
        "float16).",
    )
    memory: ByteSize | None = Field(
        None,
        description="Memory that the job may use, e.g. 8GiB, by default 80 % of the machine's: it works on fewer "
        "experts at a time if need be, and refuses to start if that is not enough.",
    )
    disk: ByteSize | None = Field(None, description="Refuse to start if the job needs more disk, e.g. 200GB.")
    shard_size: ByteSize = Field(5_000_000_000, description="Largest weight file to write.")
    proof: bool = Field(
        True, description="Load a layer of the result by transformers before it is done; refuse one that differs."
    )

    _experts_at_once: int | None = PrivateAttr(None)

    @property
    def experts_at_once(self) -> int | None:
        """Experts of a layer that are in memory at once, if a run that is resumed has fixed the number; else `None`."""
        return self._experts_at_once

    def keeping(self, experts_at_once: int | None) -> Self:
        """A copy that fixes the number of experts of a layer in memory at once, whatever `memory` allows."""
        if experts_at_once is None:
            return self
        kept = self.model_copy()
        kept._experts_at_once = experts_at_once
        return kept


OptionsT = TypeVar("OptionsT", bound=Options)


def with_text(options: OptionsT, *, needed: bool, compresses: bool = False) -> OptionsT:
    """Settle the text that a stage calibrates on: the bundled one where a text is `needed` and none is named, and none
    for `--calibration none`. Raises `UsageError` for that where one is needed; whoever `compresses` can do without."""
    named = getattr(options, "calibration", None)
    if named == NO_TEXT and not is_here(NO_TEXT):
        if needed:
            raise UsageError(
                f"--calibration {NO_TEXT}: this needs a text. Leave the option out, and the bundled text is used"
                + ("; without any text there is --method quantize --bits 4 or ders-quantize." if compresses else ".")
            )
        return options.model_copy(update={"calibration": None})
    return options.model_copy(update={"calibration": BUNDLED}) if needed and named is None else options


def context_length(config: Settings) -> int | None:
    """Largest number of positions that a model's config names; `None` for families without such a limit."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) else None


def fit_context(options: OptionsT, config: Settings, marks: int = 0) -> OptionsT:
    """Shorten windows to the model's context, less `marks` tokens around each, unless their length was asked for.

    Raises:
        UsageError: it was, and is more than the model can take.
    """
    context: int | None = context_length(config)
    length: int | None = getattr(options, "sequence_length", None)  # of options of a job that cuts its text
    if length is None or context is None or length <= context - marks:
        return options
    if "sequence_length" in options.model_fields_set:
        less = f", less {marks} for marks of beginning and end" if marks else ""
        raise UsageError(f"--sequence-length {length} is more than the model's context of {context} tokens{less}.")
    return options.model_copy(update={"sequence_length": context - marks})


def with_ratio(options: OptionsT, original: int) -> OptionsT:
    """The options with the ratio that `size` bytes are of the `original` ones, where they have both.

    Raises:
        UsageError: the original is no larger.
    """
    size: int | None = getattr(options, "size", None)
    if size is None or "ratio" not in type(options).model_fields:
        return options
    if size >= original:
        raise UsageError(
            f"--size {format_bytes(size)}: the weight files take {format_bytes(original)} as they are. Give less."
        )
    return options.model_copy(update={"ratio": 1 - size / original})
