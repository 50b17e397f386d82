"""Estimates the loss of every form of a layer's matrices, and encodes the forms that were chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.bases.delta import Deltas
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.output_metric import LayerMetric
from moetool.calibration.peers import Owned
from moetool.calibration.recorded import Tick
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.files import save_tensors
from moetool.compress.factors.sensitivity import LayerSensitivity, Sensitivity
from moetool.compress.mixing.loss_estimates import losses, prepared
from moetool.compress.mixing.schemes import StorageScheme
from moetool.compress.refining.layer import LayerRefining
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.job import to_cpu
from moetool.job.options import CalibrationOptions, IncludeOptions, KeepOptions, RunOptions, SizeOptions
from moetool.numerics.output_norm import ChannelNorm, LinkedNorm
from moetool.numerics.rotation import rotated
from moetool.representations import Measured


class MixingOptions(RunOptions, SizeOptions, KeepOptions, IncludeOptions, CalibrationOptions):
    """Options of all methods that choose among forms within a budget: how forms are made and measured."""

    group_size: int = Field(
        128,
        ge=1,
        description="Inputs that share a scale; lowered to a divisor of a row where needed.",
    )
    sensitivity: Sensitivity = Field(
        "channel",
        description="Weigh errors by what they cost in loss: by output channel, by matrix, or not at all. By channel, "
        "the codes of a row also correct the errors of the rows before it.",
    )
    trellis: bool = Field(
        False,
        description="Trellis-coded quantization (1 to 4 bits): less error at the same size; slower to compress and "
        "to run.",
    )
    refine: int = Field(
        0,
        ge=0,
        description="Fine-tune each expert's codes and scales for N steps; kept only where the held-out error "
        "improves (0: off).",
    )

    @property
    def in_turn(self) -> bool:
        """Whether the rows of a matrix are coded in turn, and make good for each other's errors."""
        return self.sensitivity == "channel"


def losses_path(work: Path, layer: int) -> Path:
    """The file of the work directory that holds the estimated losses of a layer's forms."""
    return work / f"losses-{layer:05d}.safetensors"


def measure(
    reader: ExpertReader,
    layer: int,
    schemes: Sequence[tuple[StorageScheme, Deltas]],
    grams: InputGramCollector,
    choice: Sensitivity,
    path: Path,
    owned: Owned,
    tick: Tick,
    *,
    refined: bool,
) -> None:
    """Write the estimated loss of every form in every scheme to a file, by all processes together.

    Losses of several schemes are to the last bit those that each of them has alone.

    Args:
        reader: reader of the model's experts.
        layer: number of the layer.
        schemes: schemes on offer, each with the layer's deltas to its base, before inputs are rotated.
        grams: Gram matrices of the experts' inputs on the text.
        choice: how errors of outputs are weighed.
        path: file to write.
        owned: matrices that this process measures.
        tick: called `measuring_steps` times.
        refined: whether codes are refined later, which corrects the size of outputs that quantization shrinks.
    """
    shape, lost = reader.shape, dict[str, Tensor]()
    statistics = schemes[0][1].base.statistics
    sensitivity = LayerSensitivity(choice, statistics, grams.energy(), grams.tokens())
    for expert in (expert for experts in grams.sets() for expert in experts):
        for group in shape.groups:
            tick()
            if not owned.has(group[0], expert):
                continue
            gram, inputs = grams.gram(expert, group[0]), dict[int | None, Measured]()
            for role in group:
                known = dict[tuple[str, int], Measured]()  # by the scheme's name and rank
                counts = sensitivity.of(role, expert, shape.matrix(role)[1], whitened=True)
                for scheme, deltas in schemes:
                    rotation, forms = scheme.input_rotation(shape, layer, role), scheme.forms[role]
                    if scheme.seed not in inputs:
                        inputs[scheme.seed] = Measured.on_inputs(gram, rotation, keeps_size=not refined)
                    delta = rotated(deltas.of(role, expert), rotation)
                    key = scheme.name, max(form.directions for form in forms)
                    if key not in known:
                        own_inputs = replace(inputs[scheme.seed], norm=ChannelNorm.of(counts.row_scale))
                        known[key] = prepared(delta, forms, own_inputs)
                    own = losses(delta, forms, reader.dtype, known[key], counts)
                    lost[loss_name(scheme, role, expert)] = torch.tensor(own, dtype=torch.float64)
    found = {name: own for others in owned.peers.gather(lost) for name, own in others.items()}
    if owned.peers.is_first:
        save_tensors(path, found)


def measuring_steps(shape: MoEShape) -> int:
    """How many steps `measure` counts for a layer: one for each expert's matrices on the same inputs."""
    return shape.experts * len(shape.groups)


def loss_name(scheme: StorageScheme, role: Role, expert: int) -> str:
    """The name of a matrix's losses in their file, for the forms of one scheme."""
    return f"{scheme.identity}.{role}.{expert}"


def encoded(
    reader: ExpertReader,
    deltas: Deltas,
    layout: LayerLayout,
    grams: InputGramCollector,
    choice: Sensitivity,
    owned: Owned,
    refining: LayerRefining | None = None,
    metric: LayerMetric | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Encode each delta of a layer that this process has, in its form of the layout.

    Args:
        reader: reader of the model's experts.
        deltas: deltas to the layer's base.
        layout: form of every delta.
        grams: Gram matrices of the experts' inputs on the text.
        choice: how errors of outputs are weighed.
        owned: matrices that this process encodes; whole experts where they are refined.
        refining: optimizer that moves each expert's tensors after they are encoded.
        metric: how errors in the matrices of the layer count together; `None` if each row counts by itself.

    Yields:
        Tensors, by name relative to the experts.
    """
    sensitivity = LayerSensitivity(choice, deltas.base.statistics, grams.energy(), grams.tokens())
    shape = reader.shape

    def encode(expert: int, *, keeps_size: bool) -> dict[Role, dict[str, Tensor]]:
        inputs = dict[tuple[Role, ...], Measured]()  # gate and up of an expert have the same
        found, errors = {}, dict[Role, Tensor]()
        seen = None if metric is None else metric.of(expert)
        for role in shape.roles:
            if not owned.has(role, expert):
                continue
            form, matrix = (layout.weights[role] or ())[expert], shape.matrix(role)
            rotation = layout.input_rotation(role)
            exact = rotated(deltas.target(role, expert, form), rotation)
            if form.is_whole:
                found[role] = form.encode(exact, reader.dtype)
                continue
            target = exact if seen is None else seen.target(role, exact, errors)
            counts = sensitivity.of(role, expert, matrix[1], whitened=True)
            if (group := shape.group(role)) not in inputs:
                inputs = {group: Measured.on_inputs(grams.gram(expert, role), rotation, keeps_size=keeps_size)}
            measured = replace(inputs[group], norm=ChannelNorm.of(counts.row_scale))
            if seen is not None and (rows := seen.rows(role)) is not None:
                norm = LinkedNorm.of(rows, len(target), target.device) if form.directions else measured.norm
                measured = replace(measured, outputs=rows, norm=norm)
            found[role] = form.encode(target, reader.dtype, prepared(target, [form], measured))
            errors[role] = exact - form.decode(found[role], matrix, reader.dtype).to(exact)
        return found

    for expert in (expert for experts in grams.sets() for expert in experts):
        made: Mapping[Role, Mapping[str, Tensor]] = encode(expert, keeps_size=refining is None)
        if refining is not None and made:  # what was not refined has to be stretched after all
            made = refining.refined(expert, made) or encode(expert, keeps_size=True)
        for role, tensors in made.items():
            for name, tensor in tensors.items():
                yield delta_name(expert, role, name), to_cpu(tensor)
    if refining is not None:
        refining.save(owned.peers)
