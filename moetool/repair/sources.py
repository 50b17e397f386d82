"""Inputs of a repair: a compressed MoE model, a moefied model, or a GGUF file."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.gguf_parts import parts_of
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.export.gguf.model import GgufSource
from moetool.format.kinds import custom_module
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.job.job import Input, Source
from moetool.runtime.building import check_sizes


@dataclass(frozen=True)
class MoefiedSource:
    """Opens a moefied model as the input of a repair, which has to skip something."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "MoefiedSource":
        """Open one by its headers. Raises `InvalidInputError` for an encoder, for a model that skips nothing, and for
        tensors of other shapes than the config has."""
        spec = custom_module(checkpoint.config)
        assert isinstance(spec, MoefiedSpec)
        _refuse_encoder(checkpoint)
        if spec.at_work == spec.experts:
            raise InvalidInputError(
                f"{checkpoint.source} computes all {spec.experts} experts (keep {spec.keep:g}), so that nothing is to "
                "be learnt back. Moefy with a smaller --keep."
            )
        if not checkpoint.is_imagined:
            check_sizes(checkpoint)
        return cls(checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which most bytes of the weight files are stored."""
        return self.checkpoint.main_dtype


@dataclass(frozen=True)
class GgufInput:
    """A GGUF file as the input of a repair.

    Attributes:
        checkpoint: what the file is read as.
        model: the same, as the tensors of such a file.
        path: where the file lies.
    """

    checkpoint: Checkpoint
    model: GgufSource
    path: Path

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "GgufInput":
        """Open one by what it is read as. Raises `InvalidInputError` for a family that moetool does not write, and for
        a model in several parts."""
        file = checkpoint.gguf_file
        assert file is not None
        if (count := len(parts_of(file))) > 1:
            raise InvalidInputError(
                f"{file} is one of {count} parts of a model, and a repair writes one file: join them first "
                f"(llama-gguf-split --merge {shlex.quote(str(file))} whole.gguf)."
            )
        return cls(checkpoint, GgufSource.of(checkpoint), file)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the checkpoint that the file is read as: 16 bits where it has fewer."""
        return self.model.dtype


RepairedSource = Source | MoefiedSource | GgufInput


def repaired_source(checkpoint: Checkpoint) -> RepairedSource:
    """Open the input of a repair. Raises `InvalidInputError` for what is no MoE model, moefied model or GGUF file."""
    if checkpoint.gguf_file is not None:
        return GgufInput.of(checkpoint)
    if isinstance(custom_module(checkpoint.config), MoefiedSpec):
        return MoefiedSource.of(checkpoint)
    return Source.of(checkpoint)


def source_before(source: Input) -> RepairedSource:
    """What a repair is planned on, beside its own original, before anything is made of a model: the model itself.
    Raises `InvalidInputError` for an encoder."""
    if isinstance(source, Source):
        return source
    _refuse_encoder(source.checkpoint)
    return MoefiedSource(source.checkpoint)


def _refuse_encoder(checkpoint: Checkpoint) -> None:
    if is_encoder(checkpoint.config):
        raise InvalidInputError(
            f"{checkpoint.source} is an encoder ({checkpoint.config['model_type']}): repair compares predictions of "
            "the next token."
        )
