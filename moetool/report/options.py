"""Options of `moetool report`: texts to evaluate on, recorded results to show, and what to compare with."""

from typing import Literal

from pydantic import Field

from moetool.calibration.opening import BOS_HELP, Bos
from moetool.job.options import Listed, Names
from moetool.measure.analysis import AnalysisOptions


class ReportOptions(AnalysisOptions):
    """Options of a report: what it measures beyond what the files already say."""

    analysis: bool = Field(
        False,
        description="Read the experts: their similarity, the energy of singular values, and sensitivity; without "
        "--layers of at most 8 layers.",
    )
    data: Listed | None = Field(
        None,
        description="Run the model on texts: perplexity on each, and which experts it reaches. As for --calibration.",
    )
    against: str | None = Field(
        None, description="What the model was made from: sizes before, and with --data KL divergence and agreement."
    )
    results: Names = Field(
        (), description="Files of what compress, tune, eval and others have printed with --json, with commas."
    )
    windows: int | None = Field(64, ge=1, description="Use only the first N windows of each text.")
    sequence_length: int = Field(2048, ge=2, description="Tokens per window; by default no more than the context.")
    bos: Bos = Field("auto", description=BOS_HELP)
    device: str = Field("auto", description="cpu, cuda, … or `map` to spread a large model over what there is.")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: float32 on CPU, else as stored)."
    )
