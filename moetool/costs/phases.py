"""Phases of whole jobs, made of `building_blocks`, under the names that progress shows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moetool.architectures import MoEShape, Role
from moetool.calibration.boundaries import stretch
from moetool.costs.building_blocks import (
    ModelSize,
    calibration_backward,
    calibration_forward,
    codes_beside,
    dense_size,
    factor_grams,
    fisher,
    head_gradients,
    input_grams,
    merging,
    output_moments,
    router_moments,
    usage,
    weights_again,
    writing,
)
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.matrix_work import factorize, linked_outputs, prepared_feedback, spectrum, tried
from moetool.format.kinds.base import Counts
from moetool.format.layout import LayerLayout
from moetool.numerics.work import Work, altogether
from moetool.representations import Representation
from moetool.representations.low_rank import break_even_rank
from moetool.representations.work import cutting
from moetool.runtime.dense import DenseModel

FORWARD, BACKWARD, FACTORIZE = "Forward", "Backward", "Factorize"
ENCODE, WRITE, ROUTERS = "Encode and write", "Write", "Routers"
PROOF = "Compare with the dense model"


@dataclass(frozen=True)
class Phase:
    """A part of a job that progress shows under its name, and its work."""

    name: str
    work: Work


Phases = tuple[Phase, ...]
# Forms of deltas on offer, and of the base, by role.
StoredForms = tuple[Mapping[Role, Sequence[Representation]], Mapping[Role, Representation]]


def gradient_phases(cost: CalibrationCost, size: ModelSize, measured: Work) -> Phases:
    """The phases of a forward and a backward pass over the windows that gradients come from, on which so much is
    `measured`. Every √L-th layer boundary is kept, those between are computed again on the way back."""
    kept = -(-size.layers // stretch(size.layers))
    forward = calibration_forward(cost, size, kept)
    return Phase(FORWARD, forward), Phase(BACKWARD, forward + calibration_backward(cost, size) + measured)


def gradient_cost(cost: CalibrationCost) -> CalibrationCost:
    """The cost of calibration on the windows that gradients are taken on, instead of all."""
    return replace(cost, samples=cost.gradient_samples)


def _back_with(few: CalibrationCost, size: ModelSize, measured: Work) -> Phases:
    """The phases of gradients, with another forward through each layer on the way back, in which deltas to its base are
    measured."""
    again = calibration_forward(few, size, measures=True) + weights_again(size)
    return gradient_phases(few, size, fisher(few, size) + again + measured)


def base_phases(cost: CalibrationCost | None, size: ModelSize, written: int) -> Phases:
    """The phases of a job that makes a base for every layer, weighted by gradients on a text if there is one."""
    if cost is None:
        return (Phase(WRITE, merging(size) + writing(size.nbytes, written, 0)),)
    few = gradient_cost(cost)
    return gradient_phases(few, size, fisher(few, size) + output_moments(few, size))


def factor_phases(
    cost: CalibrationCost | None,
    size: ModelSize,
    written: int,
    *,
    gradients: bool,
    linked: bool = False,
    refined: Work | None = None,
) -> Phases:
    """The phases of a job that makes low-rank deltas. Losses by rank are measured on the way back if there are
    gradients, else on the whole text if there is one; factors are then made on the whole text, and `refined` if so
    asked. Both in norms of outputs that count together if they are `linked`."""
    shape, deltas = size.moe, size.moe.experts * size.moe_layers
    rank = _rank_for(size, written)
    spectra, factors = Work(), Work()
    for role in shape.roles:
        matrix, whitened = shape.matrix(role), cost is not None
        on_outputs = whitened and role == "down" and matrix[0] < matrix[1]
        spectra += spectrum(matrix, on_outputs=on_outputs, whitened=whitened) * deltas
        found = factorize(matrix, rank(matrix), on_outputs=on_outputs, whitened=whitened)
        factors += (found + cutting(matrix, rank(matrix))) * deltas
    if linked:
        spectra, factors = (work + linked_outputs(shape) * deltas for work in (spectra, factors))
    write = writing(size.nbytes, written, size.tensors)
    if cost is None:
        return Phase(FACTORIZE, Work(read=size.nbytes) + spectra), Phase(ENCODE, factors + write)
    running = calibration_forward(cost, size) + factor_grams(cost, size)
    last = Phase(ENCODE, running + factors + weights_again(size) + write + (refined or Work()))
    if not gradients:
        return Phase(FORWARD, running + spectra + weights_again(size)), last
    few = gradient_cost(cost)
    moments = output_moments(few, size) if linked else Work()
    return *_back_with(few, size, factor_grams(few, size) + spectra + moments), last


def menu_phases(
    cost: CalibrationCost,
    size: ModelSize,
    written: int,
    schemes: Sequence[StoredForms],
    refined: Work | None = None,
    *,
    gradients: bool = True,
    in_turn: bool = False,
) -> Phases:
    """The phases of a job that measures every form of every delta, on the way back if it takes gradients, and encodes
    the chosen ones in a pass over the whole text.

    Args:
        cost: of the text.
        size: of the model.
        written: bytes of the result.
        schemes: forms that the deltas are offered in and that their base is stored in, by role, of each way to store
            experts on offer.
        refined: what it takes to refine one expert.
        gradients: whether it takes gradients.
        in_turn: whether rows make good for each other's errors.
    """
    shape, deltas = size.moe, size.moe.experts * size.moe_layers
    measured, encoded = prepared_feedback(shape) * deltas, {role: list[Work]() for role in shape.roles}
    for forms, base in schemes:
        measured += _bases(shape, base) * size.moe_layers
        for role, offered in forms.items():
            matrix, made = shape.matrix(role), [form for form in offered if not form.is_whole]
            measured += tried(made, matrix) * deltas
            encoded[role] += [
                form.work(matrix, fed_back=True) + (form.in_turn_work(matrix) if in_turn else Work()) for form in made
            ]
    chosen = altogether(altogether(works) * (deltas / max(1, len(works))) for works in encoded.values())
    running = calibration_forward(cost, size) + input_grams(cost, size) + (refined or Work()) * deltas
    write = writing(size.nbytes, written, size.tensors + 2 * len(shape.roles) * deltas)
    few = gradient_cost(cost)
    measured += input_grams(few, size) + (output_moments(few, size) if in_turn else Work())
    last = Phase(ENCODE, running + chosen + weights_again(size) + write)
    if not gradients:
        return Phase(FORWARD, calibration_forward(few, size) + weights_again(size) + measured), last
    return *_back_with(few, size, measured), last


def encoding_phases(
    cost: CalibrationCost | None,
    size: ModelSize,
    layouts: Mapping[int, LayerLayout],
    written: int,
    *,
    in_turn: bool = False,
) -> Phases:
    """The phases of a job that encodes deltas in known forms, on a text if there is one, with rows `in_turn` if they
    make good for each other's errors."""
    shape = size.moe
    stored = {(role, form.label): form for layout in layouts.values() for _, role, form in layout.deltas()}
    forms = Counter((role, form.label) for layout in layouts.values() for _, role, form in layout.deltas())
    fed_back = cost is not None
    works = []
    for key, count in forms.items():
        form, matrix = stored[key], shape.matrix(key[0])
        more = form.in_turn_work(matrix) if in_turn else Work()
        works.append((form.work(matrix, fed_back=fed_back) + more) * count)
    bases = altogether(_bases(shape, layout.base) for layout in layouts.values())
    encoded = altogether(works) + bases
    if not all(layout.is_baseless for layout in layouts.values()):
        encoded += merging(size)
    if cost is not None:
        encoded += calibration_forward(cost, size) + input_grams(cost, size) + weights_again(size)
    tensors = size.tensors + 2 * sum(forms.values())
    last = Phase(ENCODE, encoded + writing(size.nbytes, written, tensors))
    return *(output_phases(cost, size) if cost is not None and in_turn else ()), last


def output_phases(cost: CalibrationCost, size: ModelSize) -> Phases:
    """The phases of gradients that say how errors at the output of each layer's experts count together."""
    few = gradient_cost(cost)
    return gradient_phases(few, size, output_moments(few, size))


def with_codes_beside(phases: Phases, cost: CalibrationCost, layers: Sequence[Sequence[tuple[int, int]]]) -> Phases:
    """The phases of a job that begins with gradients, and on their way chooses the codes of matrices `[out, in]` beside
    the experts, by layer."""
    first, *others = phases
    return replace(first, work=first.work + codes_beside(gradient_cost(cost), layers)), *others


def decomposing_phases(size: ModelSize, layouts: Mapping[int, LayerLayout], written: int) -> Phases:
    """Phases of a job that makes a base and stores experts unchanged beside it."""
    bases = altogether(_bases(size.moe, layout.base) for layout in layouts.values())
    return rewriting_phases(size, written, merging(size) + bases)


def rewriting_phases(size: ModelSize, written: int, made: Work | None = None) -> Phases:
    """The phases of a job that reads weights, makes others of them, and writes these."""
    return (Phase(WRITE, writing(size.nbytes, written, size.tensors) + (made or Work())),)


def pruning_phases(cost: CalibrationCost | None, size: ModelSize, written: int) -> Phases:
    """The phases of a job that removes channels from bases, by energies that are measured on a text if there is one."""
    writes = rewriting_phases(size, written)
    return writes if cost is None else (Phase(FORWARD, calibration_forward(cost, size) + usage(cost, size)), *writes)


# Conversions of dense models.


def router_phase(cost: CalibrationCost, dense: DenseModel, name: str = FORWARD) -> Phase:
    """The phase in which a text goes through a dense model, to fit routers to the inputs of its networks."""
    size = dense_size(dense)
    return Phase(name, calibration_forward(cost, size) + router_moments(cost, size))


def proof_phase(cost: CalibrationCost, dense: DenseModel, parameters: Counts, written: int) -> Phase:
    """The phase in which both models run on a few tokens, layer by layer in fp32."""
    size = dense_size(dense)
    made = replace(
        size,
        numbers=size.numbers + parameters.added,
        active=size.active + parameters.active - (parameters.total - parameters.added),
        nbytes=written,
    )
    heads = head_gradients(cost, size) * (2 / 3)  # without gradients
    return Phase(PROOF, calibration_forward(cost, size) + calibration_forward(cost, made) + heads)


# Shared.


def _bases(shape: MoEShape, base: Mapping[Role, Representation]) -> Work:
    """The work of encoding the bases of one layer that are not stored as they are."""
    compact = {role: form for role, form in base.items() if not form.is_whole}
    made = {role: matrix for role, form in compact.items() if form.tensors(matrix := shape.matrix(role))}
    return altogether(compact[role].work(matrix) for role, matrix in made.items())


def _rank_for(size: ModelSize, written: int) -> Callable[[tuple[int, int]], float]:
    """The rank that a delta has about, by the shape of its matrix, where experts' bytes are shared out evenly."""
    shape = size.moe
    numbers = shape.expert_parameters * shape.experts * size.moe_layers
    before = size.nbytes * numbers / max(1, size.numbers)
    share = min(1.0, max(0.0, 1 - 1 / shape.experts - (size.nbytes - written) / max(1.0, before)))
    return lambda matrix: share * break_even_rank(matrix)
