"""Analysis of a checkpoint's experts: similarity, energy of singular values, sensitivity.

These are figures 1, 2, 5 and 6 of the D²-MoE paper, as numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from moetool.architectures import Role
from moetool.calibration.collectors import LayerStatistics
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.writer import is_finite
from moetool.errors import InvalidInputError, UsageError
from moetool.job.job import Source
from moetool.job.options import Options, split_names
from moetool.job.progress import Progress, phase
from moetool.job.records import read_statistics
from moetool.job.result import Keyed
from moetool.measure.inspected import Analysis, Energies, LayerAnalysis, RoleAnalysis, Similarity
from moetool.measure.similarity import energy_retention, pairwise_cka, relative_error_cost

SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90)  # per cent of the singular values
_DIGITS = 6


def _parse_layers(value: object) -> object:
    try:
        parts = split_names(value)
        return tuple(sorted(set(map(int, parts)))) if isinstance(parts, list) else parts
    except ValueError as error:
        raise ValueError("this is not a list of layers; write it like 0,4,8") from error


class AnalysisOptions(Options):
    """Options of `moetool inspect --analysis`: which layers are analyzed."""

    layers: Annotated[tuple[int, ...], BeforeValidator(_parse_layers)] | None = Field(
        None, description="With --analysis: only these layers, e.g. 0,4,8."
    )


def analyse(path: str | Path, options: AnalysisOptions, progress: Progress) -> Analysis:
    """Similarity of experts, energy of singular values and sensitivity; one layer and role is in memory at a time.

    The sensitivity of a role is `relative_error_cost`, summed over the experts, from the Fisher information that a
    compressed checkpoint keeps and the experts as they are now, in units that compare layers and roles. All matrices
    count as full ones `[out, in]`. Numbers from 0 to 1 are rounded to six decimals.

    Raises:
        UsageError: a layer that has no experts was asked for.
        InvalidInputError: the checkpoint cannot be used, or holds NaN or infinity.
    """
    source = Source.open(path)
    reader = source.experts
    chosen = _chosen(reader, options)
    statistics = read_statistics(source)
    layers = []
    with phase(progress, "Analyse", len(chosen) * len(reader.shape.roles) * (reader.shape.experts + 1), "matrices"):
        for layer in chosen:
            measured = statistics.get(layer)
            fisher = measured.fisher if measured is not None and measured.has_fisher else None
            roles = Keyed(
                (role, _analyse_role(reader, layer, role, None if fisher is None else fisher[role], progress.advance))
                for role in reader.shape.roles
            )
            costs = [entry.sensitivity for entry in roles.values() if entry.sensitivity is not None]
            layers.append(
                LayerAnalysis(
                    layer=layer,
                    sensitivity=None if fisher is None else math.fsum(costs),
                    token_share=_token_share(measured),
                    roles=roles,
                )
            )
    return Analysis(shares=SHARES, layers=layers, notes=list(_notes(reader, layers, statistics)))


def _chosen(reader: ExpertReader, options: AnalysisOptions) -> tuple[int, ...]:
    if options.layers is None:
        return reader.moe_layers
    if absent := [layer for layer in options.layers if not reader.has(layer)]:
        raise UsageError(
            f"--layers: layer {absent[0]} has no experts; there are {', '.join(map(str, reader.moe_layers))}."
        )
    return options.layers


def _analyse_role(
    reader: ExpertReader, layer: int, role: Role, fisher: Tensor | None, advance: Callable[[], None]
) -> RoleAnalysis:
    experts = range(reader.shape.experts)
    matrices = [reader.dense(layer, expert, role) for expert in experts]
    has_base = reader.layout(layer).has_base(role)
    base = _finite_base(reader, layer, role).double() if has_base else _mean(matrices)
    shares = [share / 100 for share in SHARES]
    own, deltas, zero = [], [], []
    for expert, matrix in enumerate(matrices):
        own.append(energy_retention(matrix, shares))
        delta = matrix.double() - base
        if delta.any():
            deltas.append(energy_retention(delta, shares))
        else:
            zero.append(expert)
        advance()
    cka_v, cka_u = _factor_similarity(reader, layer, role)
    entry = RoleAnalysis(
        base="stored" if has_base else "mean",
        sensitivity=None if fisher is None else math.fsum(map(relative_error_cost, fisher, matrices)),
        cka=_similarity(matrices),
        cka_v=cka_v,
        cka_u=cka_u,
        energy=Energies(_average(own), _average([energy_retention(base, shares)]), _average(deltas), zero),
    )
    advance()
    return entry


def _finite_base(reader: ExpertReader, layer: int, role: Role) -> Tensor:
    """Which experts that are stored whole do not show."""
    base = reader.full_base(layer, role)
    if not is_finite(base):
        raise InvalidInputError(f"The {role} matrix of the base of layer {layer} has NaN or infinite values.")
    return base


def _mean(matrices: Sequence[Tensor]) -> Tensor:
    """In fp64, where the mean of equal matrices is that matrix and their differences are exactly zero."""
    total = torch.zeros(matrices[0].shape, dtype=torch.float64)
    for matrix in matrices:
        total += matrix
    return total / len(matrices)


def _factor_similarity(
    reader: ExpertReader, layer: int, role: Role
) -> tuple[Similarity, Similarity] | tuple[None, None]:
    """Of V and of U, `None` unless two experts have factors."""
    read = [reader.factors(layer, expert, role) for expert in range(reader.shape.experts)]
    if sum(factors is not None for factors in read) < 2:
        return None, None
    return (
        _similarity([None if factors is None else factors[1].T for factors in read]),
        _similarity([None if factors is None else factors[0] for factors in read]),
    )


def _similarity(matrices: Sequence[Tensor | None]) -> Similarity:
    """Of every pair; `None` for an expert that has no such matrix or whose similarity is undefined."""
    there = torch.tensor([index for index, matrix in enumerate(matrices) if matrix is not None])
    cka = torch.full((len(matrices), len(matrices)), torch.nan, dtype=torch.float64)
    cka[there[:, None], there] = pairwise_cka([matrix for matrix in matrices if matrix is not None])
    pairs = cka[~torch.eye(len(matrices), dtype=torch.bool)]
    pairs = pairs[~pairs.isnan()]
    summary = (pairs.mean(), pairs.min(), pairs.max()) if len(pairs) else torch.full((3,), torch.nan)
    return Similarity([[_rounded(value) for value in row] for row in cka.tolist()], *map(_rounded, map(float, summary)))


def _average(retained: Sequence[Tensor]) -> list[float] | None:
    """Mean of energies at every share; `None` if there is nothing, or one of them is undefined."""
    if not retained or any(bool(energy.isnan().any()) for energy in retained):
        return None
    return [round(value, _DIGITS) for value in torch.stack(list(retained)).mean(0).tolist()]


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)


def _token_share(measured: LayerStatistics | None) -> list[float] | None:
    if measured is None or not measured.tokens.any():
        return None
    return [round(share, _DIGITS) for share in (measured.tokens.double() / measured.tokens.sum()).tolist()]


def _notes(
    reader: ExpertReader, layers: Sequence[LayerAnalysis], statistics: Mapping[int, LayerStatistics]
) -> Iterator[str]:
    """Everything that is missing or was decided, in sentences."""
    roles = {f"{entry.layer} {role}": found for entry in layers for role, found in entry.roles.items()}
    layouts = [reader.layout(entry.layer) for entry in layers]
    if any(entry.base == "mean" for entry in roles.values()):
        yield "Where no base is stored, the plain mean of the experts stands for it."
    if any(layout.is_pruned for layout in layouts):
        yield "Pruned channels of a base count as zeros."
    if any(layout.dynamic_channels for layout in layouts):
        yield "Dynamic pruning depends on the batch and is left out: bases are those on disk."
    if absent := [entry.layer for entry in layers if entry.layer not in statistics]:
        yield f"No statistics of a calibration in layers {_listed(absent)}: no sensitivity, no shares of tokens."
    if absent := [entry.layer for entry in layers if entry.sensitivity is None and entry.layer in statistics]:
        yield f"No gradients were measured in layers {_listed(absent)}: no sensitivity."
    if zero := sum(len(entry.energy.zero_deltas) for entry in roles.values()):
        total = len(roles) * reader.shape.experts
        yield f"{zero} of {total} deltas to the base are zero: their energy is undefined and in no mean."
    if empty := [name for name, entry in roles.items() if None in (entry.energy.experts, entry.energy.base)]:
        yield f"A matrix of zeros has no energy to retain: {_listed(empty)}."
    if any(entry.base == "stored" and _is_partial(entry.cka_v) for entry in roles.values()):
        yield "Experts without factors (rank 0, or kept dense) have no similarity of V and U."
    if reader.shape.experts == 1:
        yield "One expert alone has no similarity."
    elif constant := [name for name, entry in roles.items() if _is_partial(entry.cka)]:
        yield f"An expert whose rows are all the same has no similarity: {_listed(constant)}."


def _is_partial(similarity: Similarity | None) -> bool:
    return similarity is None or any(None in row for row in similarity.matrix)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
