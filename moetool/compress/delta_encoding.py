"""Quantized and sparse deltas: the options, costs, encoding and writing that their stages share.

Every layer is encoded once, into a file of the work directory, and copied from there when the output is written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.bases.delta import Deltas
from moetool.bases.given import base_form
from moetool.bases.layer_base import LayerBase, agreed, base_path
from moetool.calibration.collectors import LayerStatistics
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_metric import LayerMetric
from moetool.calibration.peers import Owned, Peers
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.files import save_tensors
from moetool.checkpoint.sizes import Part
from moetool.compress.coding_text import CodingText
from moetool.compress.encoded_layers import Encoding, encoded_bytes
from moetool.compress.results import EncodedLayer, LayersResult
from moetool.costs.building_blocks import moe_size
from moetool.costs.phases import encoding_phases, with_codes_beside
from moetool.errors import InvalidInputError, UsageError
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.including import included_shapes
from moetool.job.job import Job, Source, to_cpu
from moetool.job.options import Options, RunOptions
from moetool.job.plan import Plan, calibration_cost
from moetool.job.result import Json
from moetool.job.shards import OutputPlan
from moetool.job.writing import entry_for, write_model
from moetool.numerics.rotation import rotated
from moetool.representations import Measured, Representation, describe
from moetool.representations.dense import Dense
from moetool.representations.low_rank_sparse import LowRankSparse
from moetool.representations.sparse import MagnitudeSparse, Sparse

Bits = Literal[1, 2, 3, 4, 5, 6, 8]
# In YAML a number of bits is a number.
BaseBits = Annotated[Literal["1", "2", "3", "4", "5", "6", "8", "nf4", "int8"], BeforeValidator(lambda bits: str(bits))]
LoadBase = Callable[[int, Weights], LayerBase]
Form = Callable[[int, int, Role, Representation], Representation]  # layer, expert, role, how it is stored now


class BaseOptions(Options):
    """Options of the base: where it comes from, and how it is stored."""

    base: str = Field(
        "mean",
        description="What deltas are taken to: `mean` or `ties` of the experts, a base written by fisher-merge, "
        "or the dense checkpoint that the experts were upcycled from.",
    )
    base_bits: BaseBits | None = Field(
        None,
        description="Store the base quantized: in 1, 2, 3, 4, 5, 6 or 8 bits, or in bitsandbytes' formats nf4 and "
        "int8; deltas then make up for its errors.",
    )


class ExtendedOptions(BaseOptions):
    """Options of the base for stages that can store the shared expert relative to it."""

    shared_expert: bool = Field(
        False, description="Store the shared expert, if it is as wide as the others, as a delta to the same base."
    )


class CodeOptions(Options):
    """Options of codes: bits per number, and inputs that share a scale."""

    bits: Bits = Field(4, description="Bits per number of a delta.")
    group_size: int = Field(
        128,
        ge=1,
        description="Inputs that share a scale; lowered to the next divisor of a row where needed.",
    )


class SparsityOptions(Options):
    """Options of sparse deltas: which share is dropped, and which elements."""

    drop: Part = Field(0.9, gt=0, lt=1, description="Share of each delta that is dropped.")
    select: Literal["random", "magnitude"] = Field(
        "random",
        description="Drop at random and scale up the rest (no byte is spent on where it is), or drop the smallest.",
    )
    rank: int = Field(
        0,
        ge=0,
        description="Take a low-rank part of this rank out of each delta first, and drop from what is left.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of what is dropped.")


def refuse_compressed(source: Source) -> None:
    """Raise `UsageError` for a model whose experts a method has stored already."""
    if source.experts.layouts:
        raise UsageError(
            f"{source.checkpoint.source} has experts in moetool's format already. Write them back first: moetool "
            f"export {source.checkpoint.source} NEW --format dense-experts. If it was compressed and not trained "
            "since, compress its original instead, which loses less."
        )


def base_representations(
    shape: MoEShape, bits: str | None, group: int, trellis: bool = False
) -> dict[Role, Representation]:
    """Representation of the base of each role. Raises `UsageError` if it cannot be cut into groups."""
    return {
        role: Dense() if bits is None else base_form(bits, group, shape.matrix(role), trellis) for role in shape.roles
    }


def encoded_layouts(source: Source, form: Form) -> dict[int, LayerLayout]:
    """The layouts of a decomposed checkpoint with every delta in another form.

    Raises:
        InvalidInputError: no experts have a base, or their deltas are already quantized or sparse.
    """
    reader = source.experts
    if all(reader.layout(layer).is_native for layer in reader.moe_layers):
        raise InvalidInputError(f"{source.checkpoint.source} has no shared base: run decompose on it first.")
    layouts = {}
    for layer in reader.moe_layers:
        old = reader.layout(layer)
        weights: dict[Role, tuple[Representation, ...] | None] = {}
        for role in reader.shape.roles:
            own = old.weights[role]
            if own is None:  # a group that svd-compress found better off without a base
                weights[role] = None
                continue
            if others := [entry for entry in own if not entry.is_plain]:
                raise InvalidInputError(
                    f"The deltas of layer {layer} are stored as {describe(others)} already. Start from what this was "
                    "compressed from, or decompose what export --format dense-experts writes of it."
                )
            weights[role] = tuple(form(layer, expert, role, entry) for expert, entry in enumerate(own))
        layouts[layer] = LayerLayout(reader.shape, weights, old.base_channels, old.dynamic_channels, old.base)
    return layouts


def decomposed_layouts(
    source: Source, base: Mapping[Role, Representation], form: Form, *, shared_expert: bool
) -> dict[int, LayerLayout]:
    """The layouts of an ordinary checkpoint that gets a base, and its deltas to it in some form."""
    shape = source.experts.shape
    count = shape.experts + shared_expert

    def layout(layer: int) -> LayerLayout:
        weights: dict[Role, tuple[Representation, ...] | None] = {
            role: tuple(form(layer, expert, role, Dense()) for expert in range(count)) for role in shape.roles
        }
        return LayerLayout(shape, weights, shape.intermediate, base=base)

    return {layer: layout(layer) for layer in source.experts.moe_layers}


def quantized(bits: int, group: int, shape: MoEShape) -> Form:
    """A form that stores full deltas, and the factors of low-rank ones, as codes."""

    def form(layer: int, expert: int, role: Role, old: Representation) -> Representation:
        return in_groups(old.quantized(bits, group), shape.matrix(role), group)

    return form


def in_groups(form: Representation, matrix: tuple[int, int], group: int) -> Representation:
    """Fit a form to a matrix `[out, in]`: with the largest groups, up to `group`, that its rows can be cut into.

    Raises:
        UsageError: only groups of one would fit.
    """
    try:
        return form.fitted(matrix)
    except ValueError as error:
        raise UsageError(f"--group-size {group}: {error}.") from error


def sparse(options: SparsityOptions) -> Form:
    """Make the choice of a sparse form for each delta, by `--drop` and `--select`.

    Raises:
        InvalidInputError: a delta is not stored whole, so that nothing can be dropped from it.
    """

    def form(layer: int, expert: int, role: Role, old: Representation) -> Representation:
        if not old.is_whole:
            raise InvalidInputError(
                f"The deltas of layer {layer} are low-rank: there is nothing to drop. quantize-delta makes their "
                "factors smaller."
            )
        few: Sparse | MagnitudeSparse = Sparse.derived(options.drop, options.seed, layer, expert, role)
        if options.select == "magnitude":
            few = MagnitudeSparse(float(f"{1 - options.drop:.12g}"))
        return LowRankSparse(options.rank, few) if options.rank else few

    return form


def agreed_layouts(peers: Peers, layouts: Mapping[int, LayerLayout]) -> dict[int, LayerLayout]:
    """Give all processes the layouts of the first, since the last digit of a loss may make them choose differently."""
    if peers.size == 1:
        return dict(layouts)
    shapes = {layer: layout.shape for layer, layout in layouts.items()}
    said = peers.broadcast({layer: layout.to_config() for layer, layout in layouts.items()})
    return {layer: LayerLayout.from_config(shapes[layer], config) for layer, config in said.items()}


def encoding_plan(
    stage: str,
    source: Source,
    options: RunOptions,
    layouts: Mapping[int, LayerLayout],
    text: CodingText | None = None,
    **details: Json,
) -> Plan:
    """Costs of encoding every delta into known forms, on a text if there is one; sizes are exact."""
    reader = source.experts
    output = OutputPlan(source, layouts, options.shard_size).nbytes
    cost = calibration_cost(source, options, None) if text is None else text.cost
    at_once = None if text is None else text.experts_at_once
    bases = sum(
        layout.base[role].nbytes(layout.base_shape(role), reader.dtype)
        for layout in layouts.values()
        for role in reader.shape.roles
        if layout.weights[role] is not None
    )
    scratch = bases + encoded_bytes(reader, output, options.shard_size)
    memory = cost.layer_memory(reader)
    if text is not None:
        scratch += text.scratch(source)
        memory, details["experts_at_once"] = text.memory, at_once
    in_turn = text is not None and text.in_turn
    size = moe_size(reader, at_once)
    phases = encoding_phases(cost if text else None, size, layouts, output, in_turn=in_turn)
    return Plan(
        stage=stage,
        input_bytes=source.checkpoint.weight_bytes,
        output_bytes=output,
        scratch_bytes=scratch,
        memory_bytes=memory.nbytes(at_once),
        phases=with_codes_beside(phases, cost, included_shapes(source)) if in_turn else phases,
        details={"layers": len(layouts), "experts": reader.shape.experts, **details},
    )


def run_encoding(
    job: Job,
    stage: str,
    layouts: Mapping[int, LayerLayout],
    load_base: LoadBase,
    statistics: Mapping[int, LayerStatistics],
    text: CodingText | None = None,
) -> LayersResult:
    """Encode every layer, on the text if there is one, and write the result."""

    reader = job.source.experts
    calibrated = None if text is None else text.opened(job)

    def encode(layer: int, module: nn.Module, layout: LayerLayout, owned: Owned) -> Iterator[tuple[str, Tensor]]:
        weights, grams, metric = reader.weights(layer), None, None
        if text is not None and calibrated is not None:
            grams = text.grams(calibrated, layer, module, owned)
            weights = calibrated.weights(layer, module)
            metric = text.metric(calibrated, layer, grams, weights) if text.in_turn else None
        base = agreed(owned.peers, base_path(job.work, layer), load_base(layer, weights))
        return _encoded(job, layer, layout, Deltas(weights, base, job.device), grams, metric, owned)

    encoding = Encoding(job, layouts, encode, calibrated)
    facts = None if calibrated is None else calibrated.facts

    def told() -> dict[int, EncodedLayer]:
        return {layer: EncodedLayer(_errors(job.work, layer)) for layer in layouts}

    write_model(
        job,
        OutputPlan(job.source, layouts, job.options.shard_size),
        encoding.tensors,
        entry=entry_for(layouts, job.source, method=stage),
        statistics=statistics,
        calibration=facts,
        layers=told,
        making=encoding,
    )
    return LayersResult(calibration=facts, layers=told())


def _errors_path(work: Path, layer: int) -> Path:
    return work / f"errors-{layer:05d}.safetensors"


def _encoded(
    job: Job,
    layer: int,
    layout: LayerLayout,
    deltas: Deltas,
    grams: InputGramCollector | None,
    metric: LayerMetric | None,
    owned: Owned,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of every delta that this process has, by name relative to the experts; the errors of all go into a
    file."""
    reader, shape = job.source.experts, job.source.experts.shape
    roles = [role for role in shape.roles if layout.weights[role] is not None]
    found = {role: torch.zeros(layout.stored_experts, 2, dtype=torch.float64) for role in roles}
    routed, every = shape.experts, range(layout.stored_experts)
    # What the shared expert is given is not collected: its codes are the nearest ones.
    sets = [every] if grams is None else chain(grams.sets(), [every[routed:]])
    for expert in chain.from_iterable(sets):
        given = grams if expert < routed else None
        own = metric.of(expert) if metric is not None and expert < routed else None
        inputs, errors = dict[tuple[Role, ...], Measured](), dict[Role, Tensor]()  # gate and up have the same inputs
        for role in roles:
            if not owned.has(role, expert):
                continue
            form, rotation = (layout.weights[role] or ())[expert], layout.input_rotation(role)
            if (group := shape.group(role)) not in inputs:
                inputs = {
                    group: Measured() if given is None else Measured.on_inputs(given.gram(expert, role), rotation)
                }
            exact = rotated(deltas.target(role, expert, form), rotation)
            factors = reader.factors(layer, expert, role)
            basis = None if factors is None else factors[0].float().to(job.device)
            measured, target = replace(inputs[group], basis=basis), exact
            if own is not None:
                measured, target = replace(measured, outputs=own.rows(role)), own.target(role, exact, errors)
            encoded = form.encode(target, reader.dtype, measured)
            errors[role] = exact - form.decode(encoded, shape.matrix(role), reader.dtype).to(job.device)
            squares = [each.double().square().sum() for each in (errors[role], exact)]
            found[role][expert] = torch.stack(squares).cpu()
            for name, tensor in encoded.items():
                yield delta_name(expert, role, name), to_cpu(tensor)
    for squares_of_all in found.values():
        owned.peers.all_reduce(squares_of_all)
    if owned.peers.is_first:
        save_tensors(_errors_path(job.work, layer), {str(role): own for role, own in found.items()})


def _errors(work: Path, layer: int) -> dict[Role, list[float]]:
    """Norm of each delta's error relative to the delta, by role and expert."""
    found = load_file(_errors_path(work, layer))
    return {
        role: [float(f"{(lost / total) ** 0.5 if total else 0.0:.4g}") for lost, total in found[role].tolist()]
        for role in ROLES
        if role in found
    }
