"""Quantized and sparse deltas: costs, encoding and writing that their stages share.

Every layer is encoded once, into a file of the work directory, and copied from there when the output is written.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moetool.architectures import ROLES, Role
from moetool.bases.delta import Deltas
from moetool.bases.layer_base import LayerBase, agreed, base_path, stored_base
from moetool.calibration.collectors import LayerStatistics
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_metric import LayerMetric
from moetool.calibration.peers import Owned
from moetool.checkpoint.experts import Weights
from moetool.checkpoint.files import save_tensors
from moetool.compress.coding_text import CodingText
from moetool.compress.delta_forms import Form, encoded_layouts
from moetool.compress.encoded_layers import Encoding, encoded_bytes
from moetool.compress.results import EncodedLayer, LayersResult
from moetool.costs.building_blocks import moe_size
from moetool.costs.phases import encoding_phases, with_codes_beside
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.including import included_shapes
from moetool.job.job import Job, Source, to_cpu
from moetool.job.options import RunOptions
from moetool.job.plan import Plan, calibration_cost
from moetool.job.records import read_statistics
from moetool.job.result import Json, relative_error
from moetool.job.shards import OutputPlan
from moetool.job.stage import Stage, StageOptionsT
from moetool.job.writing import entry_for, write_model
from moetool.numerics.rotation import rotated
from moetool.representations import Measured

LoadBase = Callable[[int, Weights], LayerBase]


def encoding_plan(
    stage: str,
    source: Source,
    options: RunOptions,
    layouts: Mapping[int, LayerLayout],
    text: CodingText | None,
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
    text: CodingText | None,
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
        role: [relative_error(lost, total) for lost, total in found[role].tolist()] for role in ROLES if role in found
    }


class EncodedDeltas(Stage[StageOptionsT]):
    """Stores the deltas of a decomposed checkpoint in another form."""

    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    @abstractmethod
    def _form(self) -> Form:
        """Return the function that gives the representation of a delta by layer, expert and role."""

    @cached_property
    def _text(self) -> CodingText | None:
        """The text that codes are chosen on; `None` where they are not chosen on a text."""
        return CodingText.of(self.source, self.options)

    def _plan(self, **details: Json) -> Plan:
        return encoding_plan(self.name, self.source, self.options, self._layouts(), self._text, **details)

    def _layouts(self) -> dict[int, LayerLayout]:
        return encoded_layouts(self.source, self._form())

    def run(self, job: Job) -> LayersResult:
        reader, statistics = self.source.experts, read_statistics(self.source)

        def base(layer: int, weights: Weights) -> LayerBase:
            return stored_base(reader, layer)

        return run_encoding(job, self.name, self._layouts(), base, statistics, self._text)
