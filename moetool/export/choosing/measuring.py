"""A calibration text on its way through an exported model and back: what errors in each matrix cost, and what each type
that is on offer for a tensor loses.

Beside the losses it leaves in the work directory what codes are chosen by: by layer, how errors at the outputs of its
experts count together (`metric_path`), and in the rows of each projection (`row_moments_path`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_gradients import OutputGradients, metric_path
from moetool.calibration.peers import Owned
from moetool.calibration.projection_grams import ProjectionGrams
from moetool.calibration.recorded import Tick, spread
from moetool.calibration.row_moments import row_moments_path, save_row_moments
from moetool.checkpoint.files import save_tensors
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing.ends import Ends
from moetool.export.choosing.losses import TRIED_EXPERTS, LayoutT, TypeLosses, try_types
from moetool.export.choosing.menu import Menu
from moetool.export.choosing.moments import LayerMoments
from moetool.export.choosing.written import WrittenModel, WrittenTensor
from moetool.job.calibrated import CalibratedJob


def measure_types(
    calibrated: CalibratedJob, written: WrittenModel, ends: Ends, menu: Menu[LayoutT] | None
) -> dict[str, list[float]]:
    """Take the text through the model and back, and estimate by tensor what each type on the menu loses.

    Args:
        calibrated: the job with its text, for which gradients are taken.
        written: where the matrices of the result come from.
        ends: embeddings and head.
        menu: types on offer for each tensor; all experts of a layer are to be in memory then. `None` if nothing is to
            be chosen but codes.

    Raises:
        InvalidInputError: the model gives no numbers on the text.
    """
    layers, sweep, work = range(written.layers), calibrated.gradient_sweep, calibrated.job.work
    types = {} if menu is None else menu.types
    tensors = {} if menu is None else {own.name: own for own in menu.tensors if own.name in types}

    def visit(layer: int, module: nn.Module) -> None:
        device, watched = calibrated.job.device, written.watched(layer, module)
        due = {name: own for name, own in tensors.items() if own.layer == layer}
        seen = {path: own.module for path, own in watched.items() if not due.keys().isdisjoint(own.shapes)}
        grams = ProjectionGrams(layer, seen, sweep, device)
        moments = LayerMoments(written, layer, module, device, sweep.length, sweep.own.start)
        has_experts = written.experts is not None and layer in written.experts.moe_layers
        experts = _inputs_of_experts(written, calibrated) if has_experts and due else None
        outputs = OutputGradients(sweep, device) if has_experts else None
        with grams.watching(), moments.watching():
            sweep.backward(layer, module, [own for own in (moments, experts, outputs) if own is not None])
        grams.reduce(sweep.peers)
        if not sweep.peers.is_first:
            return
        if outputs is not None:
            outputs.save(metric_path(work, layer))
        save_row_moments(row_moments_path(work, layer), moments.between_rows)
        if menu is None:
            return
        losses = {name: TypeLosses(menu.types[name]) for name in due}
        tick = spread(sweep.tick, sweep.batch_count, len(losses))
        for owner, same in grams.shared().items():
            inputs = PreparedGram.of(grams[owner])
            for path in same:
                tried = [name for name in watched[path].shapes if name in losses]
                try_types(
                    [losses[name] for name in tried],
                    [torch.cat(list(due[name].parts())).to(device) for name in tried],
                    moments.by_name[tried[0]].given[0],
                    [moments.sensitivity(name) for name in tried],
                    inputs,
                )
                for _ in tried:
                    tick()
        if experts is not None:
            _try_experts(written, layer, losses, due, moments, experts, tick)
        found = {name: torch.tensor(own.estimates(), dtype=torch.float64) for name, own in losses.items()}
        save_tensors(_file(work, layer), found)

    passes = 1 if menu is None else 2  # trying types counts as a pass over the text
    calibrated.reverse(visit, passes, layers, ends.see_head)
    found = dict[str, list[float]]()
    if menu is not None and sweep.peers.is_first:
        for layer in layers:
            found |= {name: lost.tolist() for name, lost in load_file(_file(work, layer)).items()}
        found |= {own.name: ends.losses(own, menu.types[own.name]) for own in tensors.values() if own.layer < 0}
    return sweep.peers.broadcast(found)


def _inputs_of_experts(written: WrittenModel, calibrated: CalibratedJob) -> InputGramCollector:
    """A collector of what experts are given, for the first process, which tries their types."""
    assert written.experts is not None
    shape, sweep = written.experts.shape, calibrated.gradient_sweep
    return InputGramCollector(shape, calibrated.job.device, Owned.by_first(shape, sweep.peers), first=sweep.own.start)


def _try_experts(
    written: WrittenModel,
    layer: int,
    losses: Mapping[str, TypeLosses],
    tensors: Mapping[str, WrittenTensor],
    moments: LayerMoments,
    grams: InputGramCollector,
    tick: Tick,
) -> None:
    """Add the experts of a layer, in all roles whose tensors have a choice."""
    assert written.experts is not None
    for roles in (written.experts.shape.entering, ("down",)):
        names = [name for role in roles if (name := written.expert_tensor(layer, role)) in losses]
        if not names:
            continue
        counts = moments.by_name[names[0]].counts.tolist()
        busiest = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)[:TRIED_EXPERTS]
        for expert, matrices in enumerate(zip(*(tensors[name].parts() for name in names), strict=True)):
            inputs = PreparedGram.of(grams.gram(expert, roles[0])) if expert in busiest and counts[expert] else None
            try_types(
                [losses[name] for name in names],
                [matrix.to(moments.by_name[names[0]].given.device) for matrix in matrices],
                moments.by_name[names[0]].given[expert],
                [moments.by_name[name].sensitivity[expert] for name in names],
                inputs,
            )
        for _ in names:
            tick()


def _file(work: Path, layer: int) -> Path:
    return work / f"losses-{layer:05d}.safetensors"
