"""Options that all commands have in common that load a model and run it."""

from typing import Literal

from pydantic import Field

from moetool.job.options import Options
from moetool.runtime.synthesis import Synthesis


class LoadedOptions(Options):
    """Options for loading a model to run it: device, dtype, and share of experts of a moefied model."""

    device: str = Field("auto", description="cpu, cuda, … or `map` to spread a large model over what there is.")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: as it is stored)."
    )
    keep: float | None = Field(
        None, gt=0, le=1, description="Of a moefied model, the share of experts to compute [default: as it was made]."
    )


class EvaluatedOptions(LoadedOptions):
    """Options of commands that run a model on many tokens at a time."""

    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: float32 on CPU, else as stored)."
    )
    synthesize: Synthesis = Field(
        "auto",
        description="Make a compressed model's experts dense when it is loaded (fast, needs the original's memory) or "
        "as they run (auto: when loaded, if deltas are quantized or sparse and the experts fit in memory).",
    )


class GeneratingOptions(LoadedOptions):
    """Options of commands that run a model token by token."""

    synthesize: Synthesis = Field(
        "auto",
        description="Make a compressed model's experts dense when it is loaded (needs the original's memory) or as "
        "they run (auto: as they run, where kernels do that faster than dense ones would).",
    )
