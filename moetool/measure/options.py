"""What all commands that load a model and run it ask for."""

from typing import Literal

from pydantic import Field

from moetool.job.options import Options


class LoadedOptions(Options):
    """How a model is loaded."""

    device: str = Field("auto", description="cpu, cuda, … or `map` to spread a large model over what there is.")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: as it is stored)."
    )
    keep: float | None = Field(
        None, gt=0, le=1, description="Of a moefied model, the share of experts to compute [default: as it was made]."
    )
