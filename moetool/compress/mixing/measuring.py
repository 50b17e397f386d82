"""What every form of every matrix of a layer would lose, and the tensors of those that were chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.bases.delta import Deltas
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.files import save_tensors
from moetool.compress.choices import Sensitivity
from moetool.compress.factors.sensitivity import LayerSensitivity
from moetool.compress.menu import losses, prepared
from moetool.compress.mixing.footings import Footing
from moetool.compress.refining.layer import LayerRefining
from moetool.format.layout import LayerLayout, delta_name
from moetool.job.job import to_cpu
from moetool.numerics.rotation import Rotation
from moetool.representations import Measured


def losses_path(work: Path, layer: int) -> Path:
    """Where what the forms of a layer's matrices lose waits for the choice."""
    return work / f"losses-{layer:05d}.safetensors"


def measure(
    reader: ExpertReader,
    layer: int,
    footings: Sequence[tuple[Footing, Deltas]],
    grams: InputGramCollector,
    choice: Sensitivity,
    path: Path,
    owned: Owned,
    *,
    refined: bool,
) -> None:
    """Leave in the work directory what every form on every footing would lose, by all processes together.

    Of each footing `Deltas` gives what is to be stored there, before inputs are rotated. What footings of one name lose
    is to the last bit what each of them would alone. What is to be `refined` need not have outputs of the right size.
    """
    shape, lost = reader.shape, dict[str, Tensor]()
    statistics = footings[0][1].base.statistics
    sensitivity = LayerSensitivity(choice, statistics, grams.energy(), grams.tokens())
    for expert in (expert for experts in grams.sets() for expert in experts):
        for group in shape.groups:
            if not owned.has(group[0], expert):
                continue
            gram, inputs = grams.gram(expert, group[0]), dict[int | None, Measured]()
            for role in group:
                known = dict[tuple[str, int], Measured]()  # by footing's name and rank
                counts = sensitivity.of(role, expert, shape.matrix(role)[1], whitened=True)
                for footing, deltas in footings:
                    turn, forms = footing.turning(shape, layer, role), footing.forms[role]
                    if footing.seed not in inputs:
                        inputs[footing.seed] = _inputs(gram, turn, refined=refined)
                    delta = _turned(deltas.of(role, expert), turn)
                    key = footing.name, max(form.directions for form in forms)
                    if key not in known:
                        known[key] = prepared(delta, forms, replace(inputs[footing.seed], row_scale=counts.row_scale))
                    own = losses(delta, forms, reader.dtype, known[key], counts)
                    lost[loss_name(footing, role, expert)] = torch.tensor(own, dtype=torch.float64)
    found = {name: own for others in owned.peers.gather(lost) for name, own in others.items()}
    if owned.peers.is_first:
        save_tensors(path, found)


def loss_name(footing: Footing, role: Role, expert: int) -> str:
    """By which the losses of a matrix on a footing are found in their file."""
    return f"{footing.menu}.{role}.{expert}"


def _inputs(gram: Tensor, turn: Rotation | None, *, refined: bool) -> Measured:
    return Measured(gram if turn is None else turn.gram(gram), keeps_size=not refined).with_feedback()


def _turned(matrix: Tensor, turn: Rotation | None) -> Tensor:
    return matrix if turn is None else turn(matrix)


def encoded(
    reader: ExpertReader,
    deltas: Deltas,
    layout: LayerLayout,
    grams: InputGramCollector,
    choice: Sensitivity,
    owned: Owned,
    refining: LayerRefining | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of every delta of a layer that this process has in the form it got, by name relative to the
    experts; with `refining` moved, for which it has whole experts."""
    sensitivity = LayerSensitivity(choice, deltas.base.statistics, grams.energy(), grams.tokens())

    def own(expert: int) -> dict[Role, dict[str, Tensor]]:
        inputs: dict[bool, Measured] = {}
        found = {}
        for role in reader.shape.roles:
            if not owned.has(role, expert):
                continue
            form, matrix, turn = (layout.weights[role] or ())[expert], reader.shape.matrix(role), layout.turning(role)
            target = _turned(deltas.target(role, expert, form), turn)
            if form.is_whole:
                found[role] = form.encode(target, reader.dtype)
                continue
            counts = sensitivity.of(role, expert, matrix[1], whitened=True)
            if (role == "down") not in inputs:  # gate and up of an expert are given the same
                gram = grams.gram(expert, role)
                inputs = {role == "down": _inputs(gram, turn, refined=refining is not None)}
            measured = prepared(target, [form], replace(inputs[role == "down"], row_scale=counts.row_scale))
            found[role] = form.encode(target, reader.dtype, measured)
        return found

    for expert in (expert for experts in grams.sets() for expert in experts):
        made: Mapping[Role, Mapping[str, Tensor]] = own(expert)
        if refining is not None and made:
            made = refining.refined(expert, made)
        for role, tensors in made.items():
            for name, tensor in tensors.items():
                yield delta_name(expert, role, name), to_cpu(tensor)
    if refining is not None:
        refining.save(owned.peers)
