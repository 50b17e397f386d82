"""Options of `moetool chat` and `moetool serve`, and which of them a GGUF file has no use for."""

from pathlib import Path

from pydantic import Field

from moetool.checkpoint.gguf import gguf_in
from moetool.checkpoint.source import is_here, local_path
from moetool.errors import UsageError, option_of
from moetool.measure.options import GeneratingOptions

# Options that say how moetool runs a model; llama.cpp runs GGUF files.
_OURS = {"compute_dtype", "keep", "synthesize"}


class TalkOptions(GeneratingOptions):
    """Options that `moetool chat` and `moetool serve` share."""

    context: int | None = Field(
        None,
        ge=1,
        description="Of a .gguf file, positions that memory is taken for [default: as many as the model has].",
    )


class ChatOptions(TalkOptions):
    """Options of `moetool chat`: system message, length and sampling of answers."""

    system: str | None = Field(None, description="System message, before the first question.")
    max_tokens: int = Field(512, ge=1, description="Most tokens of an answer.")
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token every time; 1 draws as it predicts.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of what is drawn.")


class ServeOptions(TalkOptions):
    """Options of `moetool serve`: address and port to listen at."""

    host: str = Field("127.0.0.1", description="Address to listen at; 0.0.0.0 is every address of this machine.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen at; 0 takes a free one.")


def gguf_file(model: str) -> Path | None:
    """The GGUF file that llama.cpp runs for this name; `None` for a checkpoint."""
    return gguf_in(local_path(model)) if is_here(model) else None


def check_options(model: str, file: Path | None, options: TalkOptions) -> None:
    """Raise `UsageError` if an option was given that only says how moetool runs a checkpoint, or llama.cpp a file."""
    given = options.model_fields_set
    if file is not None and (wrong := sorted(given & _OURS)):
        raise UsageError(
            f"{option_of(wrong[0])} is for checkpoints: llama.cpp runs {file}, in the types that it is stored in."
        )
    if file is None and "context" in given:
        raise UsageError(f"--context is for .gguf files: {model} is a checkpoint, whose memory grows with the text.")
