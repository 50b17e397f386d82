"""Result records of `moetool inspect` (docs/json.md)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moetool.architectures import Role
from moetool.job.result import Inlined, Json, Keyed, Printed
from moetool.measure.results import Matrix


@dataclass(frozen=True)
class ParameterCounts(Printed):
    """Numbers in the model that a checkpoint stands for, those of them that one token uses, those in its files, and
    those beyond one dense FFN per layer."""

    total: int
    active: int
    stored: int
    added: int


@dataclass(frozen=True, kw_only=True)
class Files(Inlined):
    """The files of a checkpoint.

    Attributes:
        bytes: of the weight files.
        original_bytes: of those that it was compressed from.
        ratio: `1 - bytes / original_bytes`, rounded.
        files: with weights, how many.
        headers: where names and shapes come from.
        stored_as: the format of another tool that the files are in; `None` for an ordinary checkpoint.
        gguf_bytes: of the GGUF file that the checkpoint is read from, if it is.
        recipe: stage and options, from the manifest; `None` without one.
    """

    bytes: int
    original_bytes: int
    ratio: float
    files: int
    headers: Literal["files", "config.json alone"]
    recipe: Mapping[str, Json] | None
    stored_as: str | None
    gguf_bytes: int | None = None


@dataclass(frozen=True)
class SharedBase(Inlined):
    """Storage of the experts of a compressed layer.

    Attributes:
        base_channels: intermediate channels of the base in the files; 0 without a base.
        dynamic_channels: of them, how many each batch skips.
        weights: by role the representation of every expert, or `native` for a role that was left as it was.
    """

    base_channels: int
    dynamic_channels: int
    weights: Keyed[Role, Sequence[str] | Literal["native"]]


@dataclass(frozen=True, kw_only=True)
class MoELayer(Printed):
    """One layer with experts.

    Attributes:
        layer: its number.
        representation: whether its experts are as another reader knows them, or share a base.
        stored_parameters: numbers that its experts have in the files; `None` for custom modules.
        base: what is stored, if they share one.
        said: what the stage that wrote the layer noted in the manifest.
    """

    layer: int
    representation: Literal["native", "shared-base", "no-base"]
    stored_parameters: int | None = None
    base: SharedBase | None = None
    said: Keyed[str, Json] | None = None


@dataclass(frozen=True, kw_only=True)
class StoredLayers(Inlined):
    """The layers of a model whose experts are networks.

    Attributes:
        depends_on_batch: whether a token's result depends on the others of its batch; `None` for custom modules.
        moe: every layer with experts.
    """

    depends_on_batch: bool | None = None
    moe: Sequence[MoELayer]


@dataclass(frozen=True)
class MaskedLayer(Printed):
    """One linear layer whose experts are masks.

    Attributes:
        site: its name.
        channels: its inputs.
        mean_density: the share of them that an expert's mask leaves open, on average.
        union_density: the share that any does.
    """

    site: str
    representation: Literal["masks"]
    channels: int
    mean_density: float
    union_density: float

    @property
    def place(self) -> tuple[str, str]:
        """The number of its decoder layer, and its type, from its name."""
        parts = self.site.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
        return parts[number], parts[-1]


def densities(sites: Collection[MaskedLayer]) -> tuple[float, float]:
    """The mean and the union density of several linear layers, weighted by their channels."""
    channels = sum(site.channels for site in sites)
    mean = sum(site.mean_density * site.channels for site in sites) / channels
    return mean, sum(site.union_density * site.channels for site in sites) / channels


@dataclass(frozen=True)
class Masks(Inlined):
    """The linear layers of a model whose experts are masks, and all of them together.

    Attributes:
        moe: every linear layer.
        mean_density, union_density: the same of all their channels.
        overlap: `[experts][experts]`, the share of an expert's channels that another leaves open, too.
    """

    moe: Sequence[MaskedLayer]
    mean_density: float
    union_density: float
    overlap: Matrix


@dataclass(frozen=True)
class Similarity(Printed):
    """CKA of every two experts, from 0 to 1.

    Attributes:
        matrix: `[experts][experts]`; `None` where an expert has no such matrix or its similarity is undefined.
        mean, min, max: off the diagonal; `None` if there is nothing.
    """

    matrix: Sequence[Sequence[float | None]]
    mean: float | None
    min: float | None
    max: float | None


@dataclass(frozen=True)
class Energies(Printed):
    """Energy retained at the `shares` of the singular values. `None` where a matrix is zero.

    Attributes:
        experts: mean over them.
        base: of the base.
        delta: mean over the deltas that are not zero.
        zero_deltas: the experts whose delta is.
    """

    experts: Sequence[float] | None
    base: Sequence[float] | None
    delta: Sequence[float] | None
    zero_deltas: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class RoleAnalysis(Printed):
    """One role of one layer's experts.

    Attributes:
        base: `stored`, or the `mean` of the experts where none is.
        sensitivity: what errors of the same relative size in all experts cost; `None` if it was not measured.
        cka: between the experts' matrices.
        cka_v, cka_u: between the factors of their deltas as stored, V over the input channels and U over the output
            channels; `None` where fewer than two experts have factors.
        energy: in the largest singular values.
    """

    base: Literal["stored", "mean"]
    sensitivity: float | None
    cka: Similarity
    cka_v: Similarity | None
    cka_u: Similarity | None
    energy: Energies


@dataclass(frozen=True, kw_only=True)
class LayerAnalysis(Printed):
    """One layer's experts.

    Attributes:
        layer: its number.
        sensitivity: the sum over the roles.
        token_share: the part of the routed tokens that each expert was given on calibration; `None` if not measured.
        roles: of each.
    """

    layer: int
    sensitivity: float | None
    token_share: Sequence[float] | None
    roles: Keyed[Role, RoleAnalysis]


@dataclass(frozen=True, kw_only=True)
class Analysis(Printed):
    """Similarity and spectra of experts, of the kind that motivates D²-MoE (arXiv:2502.17298).

    Attributes:
        shares: of the singular values, in per cent.
        layers: those that were looked at.
        notes: what is undefined (`None`) or left out, and why.
    """

    shares: Sequence[int]
    layers: Sequence[LayerAnalysis]
    notes: Sequence[str]


@dataclass(frozen=True)
class QuantizedBeside(Printed):
    """Modules that are quantized beside the experts.

    Attributes:
        modules: projections of attention, and embeddings.
        bits: of their codes, each number once, the least first.
        bytes: of their codes and scales.
    """

    modules: int
    bits: Sequence[int]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelInspection(Printed):
    """What `moetool inspect` says of every model: family, sizes and files.

    Attributes:
        path: as it was given.
        model_type, architecture: the family.
        layers, moe_layers: decoder layers, if `config.json` counts them, and those with experts.
        experts: of these layers; 0 of a dense model.
        hidden_size, intermediate_size, dtype: of their networks; sizes are `None` where the family is not known.
        parameters: of the model that it stands for.
        files: what it takes on disk.
    """

    path: str
    model_type: str
    architecture: str
    layers: int | None
    moe_layers: int
    experts: int
    hidden_size: int | None
    intermediate_size: int | None
    dtype: str
    parameters: ParameterCounts
    files: Files


@dataclass(frozen=True, kw_only=True)
class DenseInspection(ModelInspection):
    """Result of `moetool inspect` of a dense model.

    Attributes:
        commands: those that take it.
    """

    commands: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Inspection(ModelInspection):
    """Result of `moetool inspect` of a model with experts.

    Attributes:
        router_rule, top_k: of its layers with experts.
        moe: how its experts are stored.
        beside: what else is quantized, if something is.
        analysis: what they are like, if that was asked for.
    """

    router_rule: str
    top_k: int
    moe: StoredLayers | Masks
    beside: QuantizedBeside | None = None
    analysis: Analysis | None = None
