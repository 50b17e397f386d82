"""A calibration text on its way through a model that is exported: what its matrices are given, and what types lose."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.checkpoint.files import save_tensors
from moetool.export.choosing.menu import Menu
from moetool.export.choosing.moments import LayerMoments
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.imatrix import imatrix_tensors
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.tensor_types import FewBits, rounding_losses
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import DenseSource, Job, Source
from moetool.job.options import TextOptions

_LOSSES = ".losses"


@dataclass(frozen=True)
class TensorStatistics:
    """Importance matrix and rounding losses, as measured on the text.

    Attributes:
        importance: tensors of an importance matrix.
        losses: by tensor, of each type on the menu; of those in layers.
    """

    importance: dict[str, Tensor]
    losses: dict[str, list[float]]


def measure_tensors(
    job: Job[GgufSource], calibrated: CalibratedJob, tensors: Mapping[str, GgufTensor], menu: Menu[FewBits] | None
) -> TensorStatistics:
    """Run the text through the model, layer by layer; with a menu there and back again.

    Args:
        job: the job.
        calibrated: its text, for which gradients are taken if there is a menu.
        tensors: of the file, by name.
        menu: which types there are.

    Raises:
        InvalidInputError: the model gives no numbers on the text.
    """
    source, layers = job.source, range(job.source.layers)

    def visit(layer: int, module: nn.Module) -> None:
        moments = LayerMoments(source, layer, module, job.device)
        with moments.watching():
            if menu is None:
                calibrated.sweep.forward(layer, module, [moments])
            else:
                calibrated.gradient_sweep.backward(layer, module, [moments])
        found: dict[str, Tensor] = {}
        for name, own in moments.by_name.items():
            found |= imatrix_tensors(name, own.given, own.counts)
            if menu is not None and (types := menu.types.get(name)) is not None:
                lost = rounding_losses(tensors[name].parts(), types, own.given, moments.sensitivity(name))
                found[name + _LOSSES] = torch.tensor(lost, dtype=torch.float64)
        save_tensors(_file(job, layer), found)

    if menu is None:
        calibrated.forward_visiting(visit, layers)
    else:
        calibrated.reverse(visit, 1, layers)
    found = {name: tensor for layer in layers for name, tensor in load_file(_file(job, layer)).items()}
    losses = {name.removesuffix(_LOSSES): found.pop(name).tolist() for name in list(found) if name.endswith(_LOSSES)}
    return TensorStatistics(found, losses)


def on_text(job: Job[GgufSource], options: TextOptions, *, gradients: bool) -> CalibratedJob:
    """The job with its calibration text and the MoE or dense model within, for one pass or several.

    Raises:
        UsageError: the text is too short, or has changed since the job began.
        InvalidInputError: text or tokenizer cannot be used.
    """
    source = job.source
    shared = job.workspace, job.options, job.recipe, job.progress, job.interrupt, job.ranks
    if source.experts is not None:
        within: Job[Source] | Job[DenseSource] = Job(
            Source(source.checkpoint, source.experts.architecture, source.experts), *shared
        )
    else:
        assert source.dense is not None
        within = Job(DenseSource(source.checkpoint, source.dense), *shared)
    return CalibratedJob(within, options, gradients=gradients)


def _file(job: Job[GgufSource], layer: int) -> Path:
    return job.work / f"importance-{layer:05d}.safetensors"
