"""Options that all commands have in common that load a model and run it."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from moetool.checkpoint.sizes import ByteSize, Part
from moetool.job.options import Options
from moetool.runtime.synthesis import Synthesis

_GROUP = "Running the model"  # title of these options in `--help`


class LoadedOptions(Options):
    """Options for loading a model to run it: device, dtype, and share of experts of a moefied model."""

    group: ClassVar[str] = _GROUP

    device: str = Field("auto", description="cpu, cuda, … or `map` to spread a large model over what there is.")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: as it is stored)."
    )
    keep: Part | None = Field(
        None, gt=0, le=1, description="Of a moefied model, the share of experts to compute [default: as it was made]."
    )


class PagedOptions(LoadedOptions):
    """Options of commands that can leave experts in their files, for a model that is larger than memory."""

    group: ClassVar[str] = _GROUP

    offload: Literal["none", "experts"] = Field(
        "none",
        description="Leave a compressed model's experts in its files; only those used last are in memory (Linux).",
    )
    memory: ByteSize | None = Field(
        None,
        description="With --offload: memory that the process may take, e.g. 8GiB [default: 80 % of the machine's].",
    )

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.offload == "none":
            if self.memory is not None:
                raise ValueError("--memory limits what experts take that are offloaded: say --offload experts, too")
        elif self.device not in ("auto", "cpu"):
            raise ValueError(f"--offload experts is for the processor, not for --device {self.device}")
        elif getattr(self, "synthesize", "auto") == "load":
            raise ValueError("experts that are made dense (--synthesize load) cannot be offloaded")
        return self


class EvaluatedOptions(PagedOptions):
    """Options of commands that run a model on many tokens at a time."""

    group: ClassVar[str] = _GROUP

    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: float32 on CPU, else as stored)."
    )
    synthesize: Synthesis = Field(
        "auto",
        description="Make a compressed model's experts dense when it is loaded (fast, needs the original's memory) or "
        "as they run (auto: when loaded, if deltas are quantized or sparse and the experts fit in memory).",
    )


class GeneratingOptions(PagedOptions):
    """Options of commands that run a model token by token."""

    group: ClassVar[str] = _GROUP

    synthesize: Synthesis = Field(
        "auto",
        description="Make a compressed model's experts dense when it is loaded (needs the original's memory) or as "
        "they run (auto: as they run, where kernels do that faster than dense ones would).",
    )
