"""Types of a file whose codes moetool chooses itself: what each tensor loses in each, measured at the output.

A few rows of a tensor are coded in every type on offer, as they would be in the file, on the Gram matrix G of their
inputs. With gradients δ at the outputs, an error E costs about `Σ_j mean(δ_j²) E_j G E_j^T` in loss. How much of what
these rows carry is lost stands for all rows of the tensor; experts that are given most tokens stand for the others.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_gradients import OutputGradients, metric_path
from moetool.calibration.projection_grams import ProjectionGrams
from moetool.calibration.recorded import Tick, spread
from moetool.calibration.row_moments import row_moment_numbers, row_moments_path, save_row_moments
from moetool.checkpoint.files import save_tensors
from moetool.export.blocks.coding import block_codes, choosing_blocks, preparing_inputs
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.gguf.coded_layers import grams_of_experts
from moetool.export.gguf.ends import TRIED_TOKENS, Ends
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.importance import LayerMoments
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.tensor_types import Menu
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType
from moetool.format.gguf.words import EXPERTS, layer_in_file, layer_of
from moetool.job.calibrated import CalibratedJob
from moetool.job.job import Job
from moetool.numerics.work import Work, altogether

# Left out are those that lose more than another of as many bytes: q2_k more than iq2_s, q3_k more than iq3_s.
_SUPER_BLOCKS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
_SHORT = ("iq4_nl", "q5_0", "q5_1", "q8_0")  # where super-blocks do not divide a row
_TABLES = ("iq3_s", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")  # of embeddings and head, whose tokens a text has in part
_ROWS, _EXPERTS = 32, 4  # of each matrix, and of a layer, at most, that are tried


def own_menu(tensors: Sequence[GgufTensor]) -> Menu[BlockType]:
    """The types that moetool can give to each tensor of a file: to those that are not always fp32."""
    return Menu(tensors, {tensor.name: types for tensor in tensors if (types := _offered(tensor))})


def _offered(tensor: GgufTensor) -> tuple[BlockType, ...]:
    columns = tensor.shape[-1]
    if tensor.is_always_wide or not tensor.has_inputs or columns % 32:
        return ()
    names = _SHORT if columns % 256 else _SUPER_BLOCKS if layer_of(tensor.name) >= 0 else _TABLES
    return tuple(BLOCK_TYPES[name] for name in names)


def trying_types(menu: Menu[BlockType]) -> Work:
    """The work of coding a few rows of every tensor in every type on offer."""
    works = []
    for tensor in menu.tensors:
        if kinds := menu.types.get(tensor.name):
            *experts, rows, columns = tensor.shape
            most = _ROWS if layer_of(tensor.name) >= 0 else TRIED_TOKENS
            few = (*(min(count, _EXPERTS) for count in experts), min(rows, most), columns)
            works += [preparing_inputs(few, tokens=0), *(choosing_blocks(few, kind) for kind in kinds)]
    return altogether(works)


def moments_between_rows(menu: Menu[BlockType]) -> list[int]:
    """By layer, how many numbers the moments are by which rows of its projections make good for each other."""
    projections = [own for own in menu.tensors if own.name in menu.types and len(own.shape) == 2]
    layers = groupby(projections, key=lambda tensor: layer_of(tensor.name))
    return [sum(row_moment_numbers(own.shape[0]) for own in tensors) for layer, tensors in layers if layer >= 0]


def expected_coding(menu: Menu[BlockType], tensor: GgufTensor) -> Work:
    """The work of coding a tensor in a type that is still to be chosen: the mean of those on offer."""
    kinds = menu.types[tensor.name]
    in_turn = layer_of(tensor.name) >= 0
    return altogether(choosing_blocks(tensor.shape, kind, in_turn=in_turn) for kind in kinds) * (1 / len(kinds))


class TypeLosses:
    """Losses of one tensor in each type on offer: of the rows that are tried, and by these of all.

    Args:
        kinds: the types.
    """

    def __init__(self, kinds: Sequence[BlockType]) -> None:
        self.kinds, self._lost = kinds, [0.0] * len(kinds)
        self._carried = self._tried = 0.0

    def count(self, rows: Tensor, given: Tensor, sensitivity: Tensor) -> Tensor:
        """Count the rows `[out, in]` of a matrix; returns `[out]`, what each carries of the tensor's energy."""
        carried = (rows.square() @ given.float()) * sensitivity
        self._carried += carried.sum().item()
        return carried

    def add(self, index: int, lost: float) -> None:
        """Add the loss of rows that were tried in the type of that index."""
        self._lost[index] += lost

    def tried(self, carried: float) -> None:
        """Add the energy, as `count` returns it, of the rows that were coded in every type."""
        self._tried += carried

    def estimates(self) -> list[float]:
        """Estimated loss of the whole tensor in each type, in nats times the number of tokens."""
        share = self._carried / self._tried if self._tried else 0.0
        return [lost * share for lost in self._lost]


def try_types(
    losses: Sequence[TypeLosses],
    matrices: Sequence[Tensor],
    given: Tensor,
    sensitivities: Sequence[Tensor],
    inputs: PreparedGram | None,
) -> None:
    """Add matrices that have the same inputs to the losses of their tensors, which have the same types on offer.

    Args:
        losses: of the tensor of each.
        matrices: `[out, in]`.
        given: `[in]`, Σ over tokens of the squared inputs.
        sensitivities: `[out]` of each, mean squared gradients.
        inputs: of the inputs, with which some rows are coded; `None` where none are.
    """
    few, weights = [], []
    for own, matrix, sensitivity in zip(losses, matrices, sensitivities, strict=True):
        rows, sensitivity = matrix.float(), sensitivity.float()
        step = slice(0, None, -(-len(rows) // _ROWS))
        carried = own.count(rows, given, sensitivity)
        if inputs is not None:
            own.tried(carried[step].sum().item())
        few.append(rows[step])
        weights.append(sensitivity[step])
    if inputs is None:
        return
    together = torch.cat(few)
    for index, kind in enumerate(losses[0].kinds):
        errors = inputs.output_errors(together - block_codes(together, kind, inputs).decoded().T)
        for own, lost, weight in zip(losses, errors.split([len(rows) for rows in few]), weights, strict=True):
            own.add(index, (lost @ weight).item())


def measure_types(
    job: Job[GgufSource], calibrated: CalibratedJob, menu: Menu[BlockType], ends: Ends
) -> dict[str, list[float]]:
    """Take the text through the model and back, and estimate by tensor what each type on the menu loses.

    Args:
        job: the job.
        calibrated: its text, for which gradients are taken.
        menu: types on offer for each tensor.
        ends: embeddings and head.

    Raises:
        InvalidInputError: the model gives no numbers on the text.
    """
    source, layers = job.source, range(job.source.layers)
    tensors = {tensor.name: tensor for tensor in menu.tensors if tensor.name in menu.types}

    def visit(layer: int, module: nn.Module) -> None:
        names_of = source.projections(layer)
        projections = {path: module.get_submodule(path) for path in names_of}
        grams = ProjectionGrams(layer, projections, calibrated.gradient_sweep, job.device)
        moments = LayerMoments(source, layer, module, job.device, calibrated.gradient_sweep.length)
        experts = grams_of_experts(source, layer, job.device)
        with grams.watching(), moments.watching():
            outputs = OutputGradients(calibrated.gradient_sweep, job.device)
            collectors = [moments] if experts is None else [moments, experts, outputs]
            calibrated.gradient_sweep.backward(layer, module, collectors)
        if experts is not None:
            outputs.save(metric_path(job.work, layer))
        save_row_moments(row_moments_path(job.work, layer), moments.between_rows)
        losses = {name: TypeLosses(types) for name, types in menu.types.items() if layer_of(name) == layer}
        sweep = calibrated.gradient_sweep
        tick = spread(sweep.tick, sweep.batch_count, len(losses))
        for owner, same in grams.shared().items():
            tried = [own for path in same if (own := [name for name in names_of[path] if name in losses])]
            inputs = PreparedGram.of(grams[owner]) if tried else None
            for own in tried:
                try_types(
                    [losses[name] for name in own],
                    [torch.cat(list(tensors[name].parts())).to(job.device) for name in own],
                    moments.by_name[own[0]].given[0],
                    [moments.sensitivity(name) for name in own],
                    inputs,
                )
                for _ in own:
                    tick()
        if experts is not None:
            _try_experts(job, layer, losses, tensors, moments, experts, tick)
        found = {name: torch.tensor(own.estimates(), dtype=torch.float64) for name, own in losses.items()}
        save_tensors(_file(job, layer), found)

    calibrated.reverse(visit, 2, layers, ends.see_head)  # trying types counts as a pass over the text
    tables = [tensor for name, tensor in tensors.items() if layer_of(name) < 0]
    found = {tensor.name: ends.losses(tensor, menu.types[tensor.name]) for tensor in tables}
    return found | {name: lost.tolist() for layer in layers for name, lost in load_file(_file(job, layer)).items()}


def _try_experts(
    job: Job[GgufSource],
    layer: int,
    losses: Mapping[str, TypeLosses],
    tensors: Mapping[str, GgufTensor],
    moments: LayerMoments,
    grams: InputGramCollector,
    tick: Tick,
) -> None:
    """Add the experts of a layer, in all roles whose tensors have a choice."""
    assert job.source.experts is not None
    for roles in (job.source.experts.shape.entering, ("down",)):
        names = [name for role in roles if (name := layer_in_file(layer, EXPERTS[role])) in losses]
        if not names:
            continue
        counts = moments.by_name[names[0]].counts.tolist()
        busiest = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)[:_EXPERTS]
        for expert, matrices in enumerate(zip(*(tensors[name].parts() for name in names), strict=True)):
            inputs = PreparedGram.of(grams.gram(expert, roles[0])) if expert in busiest and counts[expert] else None
            try_types(
                [losses[name] for name in names],
                [matrix.to(job.device) for matrix in matrices],
                moments.by_name[names[0]].given[expert],
                [moments.by_name[name].sensitivity[expert] for name in names],
                inputs,
            )
        for _ in names:
            tick()


def _file(job: Job[GgufSource], layer: int) -> Path:
    return job.work / f"losses-{layer:05d}.safetensors"
