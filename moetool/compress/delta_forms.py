"""Forms in which deltas are stored: the options that ask for them, and the layouts of layers that have them."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moetool.architectures import MoEShape, Role
from moetool.bases.given import base_form
from moetool.calibration.peers import Peers
from moetool.checkpoint.sizes import Part
from moetool.errors import InvalidInputError, UsageError
from moetool.format.layout import LayerLayout
from moetool.job.job import Source
from moetool.job.options import Options
from moetool.representations import Representation, describe
from moetool.representations.dense import Dense
from moetool.representations.low_rank_sparse import LowRankSparse
from moetool.representations.sparse import MagnitudeSparse, Sparse

Bits = Literal[1, 2, 3, 4, 5, 6, 8]
# In YAML a number of bits is a number.
BaseBits = Annotated[Literal["1", "2", "3", "4", "5", "6", "8", "nf4", "int8"], BeforeValidator(lambda bits: str(bits))]
Form = Callable[[int, int, Role, Representation], Representation]  # layer, expert, role, how it is stored now


class CodeOptions(Options):
    """Options of codes: bits per number, and inputs that share a scale."""

    bits: Bits = Field(4, description="Bits per number of a delta.")
    group_size: int = Field(
        128,
        ge=1,
        description="Inputs that share a scale; lowered to a divisor of a row where needed.",
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
