"""Options of `moetool compare`: what is compared, and on which texts."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moetool.calibration.opening import BOS_HELP, Bos
from moetool.checkpoint.sizes import ByteSize, WindowShare, parse_share
from moetool.job.options import Listed, Names, Options, split_names
from moetool.runtime.synthesis import Synthesis


def _shares(value: object) -> object:
    found = split_names(value)
    return [parse_share(entry) for entry in found] if isinstance(found, list) else found


AskedRatios = Annotated[tuple[float, ...], BeforeValidator(_shares)]


class CompareOptions(Options):
    """Options of `compare`: models to make from one, models that exist already, and the text to measure them on."""

    methods: Names = Field(
        (),
        description="Methods of `compress`, with commas; NAME=METHOD gives a row a name of its own, so that a method "
        "can stand there several times, with other options.",
    )
    ratios: AskedRatios = Field((), description="Shares of the bytes to save, with commas: every method at every one.")
    option: tuple[str, ...] = Field(
        (), description="An option of one row, NAME:OPTION=VALUE (hybrid:base_bits=3); several times."
    )
    models: Names = Field((), description="Checkpoints that are there and belong in the table, too, with commas.")
    calibration: Listed | None = Field(None, description="Calibration text, as for `compress`.")
    samples: int | None = Field(None, ge=1, description="Windows of calibration text [default: the method's].")
    mix: WindowShare | None = Field(
        None, description="Share of these that is bundled text, as for `compress` [default: 0.5]."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random.")
    data: Listed = Field(
        description="Texts to evaluate on: files, folders, hub data sets or bundled[:KIND], as for --calibration; a "
        "column for each of several."
    )
    windows: int | None = Field(None, ge=1, description="Use only the first N windows of each text.")
    sequence_length: int | None = Field(
        None, ge=2, description="Tokens per window of both texts [default: the context, at most 2048]."
    )
    bos: Bos = Field("auto", description=BOS_HELP)
    batch_tokens: int = Field(2048, ge=1, description="Tokens per batch of the evaluation.")
    synthesize: Synthesis = Field("auto", description="When experts are made dense, as for `eval`.")
    device: str = Field("auto", description="cpu, cuda, cuda:1 … (auto: CUDA when there is a card).")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running models (auto: float32 on CPU, else as stored)."
    )
    memory: ByteSize | None = Field(None, description="Memory that making a model may use, e.g. 8GiB.")


def chosen(options: Options, fields: frozenset[str]) -> dict[str, object]:
    """Values of the named option fields, without those that are `None`."""
    return {name: value for name, value in options if name in fields and value is not None}
