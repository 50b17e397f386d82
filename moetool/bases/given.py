"""A base that is there before a job begins: what `--base` names."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.bases.choices import UNMEASURED_MERGES, Merge
from moetool.bases.layer_base import LayerBase, base_path, unweighted_base
from moetool.calibration.collectors import LayerStatistics
from moetool.calibration.output_gradients import metric_path
from moetool.checkpoint.experts import ExpertReader, Weights
from moetool.checkpoint.files import file_sha256
from moetool.checkpoint.identity import is_known_as
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.reader import Checkpoint, digest_of
from moetool.checkpoint.source import local_path
from moetool.errors import InvalidInputError, UsageError
from moetool.job.writing import down_scale
from moetool.representations import Representation, parse_representation
from moetool.representations.quantized import QuantizedMatrix
from moetool.representations.trellis import in_trellis
from moetool.runtime.dense import DenseModel

# Experts that were upcycled from a dense FFN stay close to it; below this it is hardly theirs.
_KIN = 0.5


class GivenBase(ABC):
    """Source of a given base: reads the base of every MoE layer from checkpoints."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs between bases that would give other results: digest, merge rule or source."""

    def inputs(self) -> Mapping[str, Checkpoint]:
        """Checkpoints, beside the job's input, that the base is read from, by name."""
        return {}

    @abstractmethod
    def layer(self, layer: int, weights: Weights) -> LayerBase:
        """Read or make the base of one MoE layer; `weights` gives the matrices of the layer's experts."""

    def statistics(self) -> dict[int, LayerStatistics]:
        """Statistics measured while the base was made, of the layers where there are some."""
        return {}

    def metrics(self) -> list[Path]:
        """Files that say how errors at the output of each layer's experts count together, where that was measured."""
        return []


class MergedBase(GivenBase):
    """A base that is merged from the experts' weights alone, by a rule that needs no calibration text."""

    def __init__(self, experts: ExpertReader, method: Merge, shared_expert: bool) -> None:
        self._experts, self._method = experts, method
        self._shared_expert = shared_expert

    @property
    def fingerprint(self) -> str:
        return self._method

    def layer(self, layer: int, weights: Weights) -> LayerBase:
        shape, dtype = self._experts.shape, self._experts.dtype
        return unweighted_base(weights, shape, dtype, self._method, shared_expert=self._shared_expert)


class SavedBase(GivenBase):
    """A base that `fisher-merge` wrote.

    Raises:
        InvalidInputError: it is not complete, or does not belong to these experts.
    """

    def __init__(self, experts: ExpertReader, directory: Path) -> None:
        self._directory, self._layers = directory, experts.moe_layers
        if missing := [layer for layer in experts.moe_layers if not base_path(directory, layer).exists()]:
            raise InvalidInputError(f"{directory} is not a complete base: no {base_path(directory, missing[0]).name}.")
        if not is_known_as(experts.checkpoint, read_manifest(directory).source_fingerprint):
            raise InvalidInputError(f"{directory} is the base of another model than {experts.checkpoint.source}.")
        for layer in experts.moe_layers:
            path = base_path(directory, layer)
            try:
                matrices = LayerBase.load(path).matrices
            except (OSError, KeyError, SafetensorError) as error:
                raise InvalidInputError(f"{path} is damaged ({error}). Run fisher-merge again.") from error
            for role, matrix in matrices.items():
                if tuple(matrix.shape) != experts.shape.matrix(role) or matrix.dtype != experts.dtype:
                    raise InvalidInputError(
                        f"The {role} base of layer {layer} in {directory} does not fit the experts."
                    )

    @cached_property
    def fingerprint(self) -> str:
        files = [*(base_path(self._directory, layer) for layer in self._layers), *self.metrics()]
        digests = [file_sha256(file) for file in files]
        written = read_manifest(self._directory).files
        for file, digest in zip(files, digests, strict=True):
            if written.get(file.name, digest) != digest:
                raise InvalidInputError(f"{file} is not the file that fisher-merge wrote. Run it again.")
        return digest_of(digest.encode() for digest in digests)

    def layer(self, layer: int, weights: Weights) -> LayerBase:
        return LayerBase.load(base_path(self._directory, layer))

    def statistics(self) -> dict[int, LayerStatistics]:
        found = {layer: LayerBase.load(base_path(self._directory, layer)).statistics for layer in self._layers}
        return {layer: own for layer, own in found.items() if own is not None}

    def metrics(self) -> list[Path]:
        paths = (metric_path(self._directory, layer) for layer in self._layers)
        return [path for path in paths if path.exists()]


class DenseBase(GivenBase):
    """The FFNs of the dense model that the experts were upcycled from.

    Raises:
        InvalidInputError: its family is not known, or its FFNs have another shape or other matrices.
    """

    def __init__(self, experts: ExpertReader, source: str) -> None:
        self._experts = experts
        try:
            self._dense = DenseModel(Checkpoint.open(source))
        except InvalidInputError as error:
            raise InvalidInputError(
                f"--base takes what fisher-merge wrote, or the dense model that the experts were made from. {error}"
            ) from error
        dense, shape = self._dense, experts.shape
        found = (dense.layers, dense.hidden, dense.intermediate, dense.architecture.roles)
        needed = (
            experts.architecture.layers,
            shape.hidden,
            shape.intermediate,
            shape.roles,
        )
        if found != needed:
            raise InvalidInputError(
                f"{source} has {_described(*found)}; the experts need {_described(*needed)}: it is not the dense model "
                "they were made from."
            )

    def layer(self, layer: int, weights: Weights) -> LayerBase:
        shape = self._experts.shape
        matrices = {role: self._dense.matrix(layer, role).to(self._experts.dtype) for role in shape.roles}
        matrices["down"] *= down_scale(self._experts.checkpoint)
        return LayerBase(matrices, torch.arange(shape.intermediate), shape.intermediate, None)

    @property
    def fingerprint(self) -> str:
        return self._dense.checkpoint.fingerprint()

    def inputs(self) -> Mapping[str, Checkpoint]:
        return {"base": self._dense.checkpoint}

    def kinship(self) -> float:
        """The least mean cosine similarity of base and experts over the layers."""
        lowest = 1.0
        for layer in self._experts.moe_layers:
            weights = partial(self._experts.dense, layer)
            base = self.layer(layer, weights)
            cosines = [
                F.cosine_similarity(
                    base.matrices[role].float().flatten(), weights(expert, role).float().flatten(), dim=0
                ).item()
                for role in self._experts.shape.roles
                for expert in range(self._experts.shape.experts)
            ]
            lowest = min(lowest, sum(cosines) / len(cosines))
        return lowest


def _described(layers: int, hidden: int, intermediate: int, roles: tuple[Role, ...]) -> str:
    return f"{layers} layers with FFNs of {', '.join(roles)}, {hidden} to {intermediate}"


def open_base(spec: str, experts: ExpertReader, *, shared_expert: bool) -> GivenBase:
    """The base that `--base` names: `mean`, `ties`, what `fisher-merge` wrote, or a dense checkpoint.

    Raises:
        UsageError: the experts have a base already.
        InvalidInputError: there is no such thing, or it does not fit; or the shared expert, which is to be stored on
            it, does not.
    """
    for layer in experts.moe_layers if shared_expert else ():
        experts.shared_expert_specs(layer)
    if experts.layouts:
        baseless = any(layout.is_baseless for layout in experts.layouts.values())
        raise UsageError(
            f"{experts.checkpoint.source} is already "
            + (
                "compressed, without a base: start from its source."
                if baseless
                else "decomposed: svd-compress, quantize-delta and sparsify-delta go on from there."
            )
        )
    for method in UNMEASURED_MERGES:
        if spec == method:
            return MergedBase(experts, method, shared_expert)
    directory = local_path(spec)
    if not directory.is_dir() and not ("/" in spec and not spec.startswith((".", "/", "~"))):
        raise InvalidInputError(
            f"--base {spec}: no such directory. Make one with fisher-merge, give the dense model the experts were made "
            f"from, or use {' or '.join(UNMEASURED_MERGES)}."
        )
    if directory.is_dir() and not (directory / CONFIG).exists():
        return SavedBase(experts, directory)
    return DenseBase(experts, spec)


def kinship_warning(base: GivenBase) -> str | None:
    """A warning for a dense base whose cosine similarity to the experts is too low for their origin; else `None`."""
    if not isinstance(base, DenseBase):
        return None
    cosine = base.kinship()
    if cosine >= _KIN:
        return None
    return (
        f"Warning: base and experts have a cosine similarity of only {cosine:.2f}; experts that were upcycled from it "
        "would be close to 1. Deltas to it will be as large as the experts themselves."
    )


def base_form(bits: str, group: int, shape: tuple[int, int], trellis: bool = False) -> Representation:
    """The form that `--base-bits` names for a matrix `[out, in]`; its own codes have a scale per `group` inputs, or
    per as many below that as divide them, and are in a `trellis` where the matrix can have one.

    Raises:
        UsageError: only groups of one would.
    """
    if bits.isdigit():
        codes = QuantizedMatrix(int(bits), group)
        form: Representation = in_trellis(codes, shape[0]) if trellis else codes
    else:
        form = parse_representation(bits)
    try:
        return form.fitted(shape)
    except ValueError as error:
        raise UsageError(f"--base-bits {bits}: {error}, and nf4 and int8 have no groups.") from error


def in_few_bits(base: LayerBase, bits: str | None, group: int) -> LayerBase:
    """Encode a base in the representation that `bits` names; `None` leaves it as it is."""
    if bits is None:
        return base
    forms = {role: base_form(bits, group, (matrix.shape[0], matrix.shape[1])) for role, matrix in base.matrices.items()}
    return base.encoded(forms)
