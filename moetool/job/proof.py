"""Proof of a result before it can be loaded: one of its layers, loaded as users will load it, against its files."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.shape import NORM
from moetool.calibration.disk_experts import DiskExperts
from moetool.checkpoint.decoded import decoded
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import InvalidInputError, VerificationError
from moetool.format.beside import TENSORS, quantized_beside, quantized_name, weight_of
from moetool.format.entry import is_quantized_elsewhere
from moetool.format.families import architecture_of, is_opaque
from moetool.format.marker import moetool_entry
from moetool.job.progress import Progress
from moetool.job.result import LoadedLayer
from moetool.kernels.rounding import exact_products
from moetool.numerics.seeding import generator
from moetool.runtime.building import empty_model
from moetool.runtime.memory import free_bytes
from moetool.runtime.modules.fused import run_experts
from moetool.runtime.modules.insertion import path_in

LARGEST_ERROR = 1e-5  # ‖Δ‖ / ‖output‖ in fp32
_TOKENS = 16
_COPIES = 3  # of a layer in fp32: as it is read, as it is loaded, and one expert's matrices and products beside it


def prove(made: Checkpoint, source: Checkpoint, memory: int | None, progress: Progress) -> LoadedLayer | None:
    """Load one layer of a result by transformers and compare what its experts, and matrices that are stored as codes
    beside them, give on random inputs with the matrices that the files stand for. Of all other layers names, shapes and
    ties are checked.

    Args:
        made: the result, without `config.json` and index so far.
        source: what it was made from, whose tensors may be ones that transformers does not know.
        memory: bytes that the job may use; by default those that are free.
        progress: told where the layer does not fit.

    Returns:
        What was compared; `None` for a format of another tool, whose own loader checks it.

    Raises:
        VerificationError: transformers cannot load the result, or computes something else.
    """
    if is_quantized_elsewhere(made.config):
        return None
    try:
        return _proved(made, source, memory, progress)
    except InvalidInputError as error:
        raise VerificationError(f"transformers would not load this result: {error} {_left(made)}") from error


def _proved(made: Checkpoint, source: Checkpoint, memory: int | None, progress: Progress) -> LoadedLayer:
    from moetool.runtime.loading import run_experts_of_any_width
    from moetool.runtime.one_layer import load_layer

    family = dense = None
    with suppress(InvalidInputError):
        family = None if is_opaque(made.config) else architecture_of(made.settings)
    if family is None:
        with suppress(InvalidInputError):
            dense = find_dense_architecture(made.settings)
    reader = None if family is None else ExpertReader(decoded(made), family)
    layer = 0 if reader is None else _most_kinds(reader)
    if (known := family or dense) is None:  # tune trains models that no other command knows
        load_layer(made, None, torch.float32, source.tensors)
        return LoadedLayer(layer)
    prefix = known.layer_prefix(layer)
    needed = _COPIES * sum(
        info.nbytes // info.dtype.itemsize * (4 if info.dtype.is_floating_point else info.dtype.itemsize)
        for name, info in made.tensors.items()
        if name.startswith(prefix)
    )
    room = free_bytes() if memory is None else memory
    if needed > room:
        progress.log(
            f"Layer {layer} needs {format_bytes(needed)} to be loaded in float32, of {format_bytes(room)}: only names "
            "and shapes of the result are checked."
        )
        load_layer(made, None, torch.float32, source.tensors)
        return LoadedLayer(layer)
    model = load_layer(made, prefix, torch.float32, source.tensors)
    run_experts_of_any_width(model)
    errors = [*_errors_of_codes(made, model, prefix)]
    if reader is not None:
        errors.append(_error_of_experts(made, reader, layer, model))
    return LoadedLayer(layer, float(f"{max(errors):.2g}") if errors else None)


def _most_kinds(reader: ExpertReader) -> int:
    """The MoE layer whose matrices are stored in most forms, the first of these."""

    def kinds(layer: int) -> int:
        layout = reader.layout(layer)
        return len({(role, form.spec) for _, role, form in layout.deltas()})

    return max(reader.moe_layers, key=lambda layer: (kinds(layer), -layer))


@torch.no_grad()
def _error_of_experts(made: Checkpoint, reader: ExpertReader, layer: int, model: nn.Module) -> float:
    """‖Δ‖ / ‖output‖ of a loaded layer's experts against those of the files. Raises `VerificationError` if it is more
    than rounding."""
    path = f"{reader.architecture.layer_path(layer)}.{reader.architecture.experts_module}"
    experts: Any = model.get_submodule(path)
    native: Any = experts
    if (layout := reader.layouts.get(layer)) is not None:
        experts.layout = replace(layout, dynamic_channels=0)  # what is skipped there depends on the batch
        native = _native_experts(made, path, experts)
    count, stream = reader.shape.experts, generator(0, "proof", layer)
    tokens = max(_TOKENS, count)
    hidden = torch.randn(tokens, reader.shape.hidden, generator=stream)
    chosen = torch.stack([torch.randperm(count, generator=stream)[: min(2, count)] for _ in range(tokens)])
    chosen[:count, 0] = torch.arange(count)  # each at least once
    chosen[:, -1] = torch.where(chosen[:, -1] == chosen[:, 0], (chosen[:, 0] + 1) % count, chosen[:, -1])
    weights = torch.rand(chosen.shape, generator=stream) + 0.5
    promised = DiskExperts(native, reader, layer, torch.float32, torch.device("cpu"))(hidden, chosen, weights)
    eager = getattr(experts, "eager", None)  # kernels would be compiled first
    found = run_experts(experts, hidden, chosen, weights) if eager is None else eager(hidden, chosen, weights)
    return _error(f"the experts of layer {layer}", found, promised, made)


def _native_experts(made: Checkpoint, path: str, experts: nn.Module) -> nn.Module:
    """The experts' module of transformers' own, empty but for the biases of those that stand in its place."""
    entry = {key: value for key, value in (moetool_entry(made.config) or {}).items() if key != "layers"}
    model = empty_model({**made.config, "quantization_config": entry}, made.path, torch.float32)
    native = model.get_submodule(path)
    for name, parameter in experts.named_parameters(recurse=False):
        if name.endswith("_bias"):
            setattr(native, name, parameter)
    if (norm := getattr(experts, NORM, None)) is not None:
        setattr(native, NORM, norm)
    return native


@torch.no_grad()
@exact_products()
def _errors_of_codes(made: Checkpoint, model: nn.Module, prefix: str) -> Iterator[float]:
    """‖Δ‖ / ‖output‖ of each linear layer that is stored as codes against the matrix that these stand for. Raises
    `VerificationError` if one is more than rounding."""
    for name, form in quantized_beside(made.settings).items():
        if name.startswith(prefix):
            linear: Any = model.get_submodule(path_in(model, name))
            stored = {part: made.read(quantized_name(weight_of(name), part)) for part in TENSORS}
            stored["scales"] = stored["scales"].float()
            matrix = form.decode(stored, (linear.out_features, linear.in_features), torch.float32)
            inputs = torch.randn(_TOKENS, matrix.shape[1], generator=generator(0, "proof", name))
            output = linear(inputs) if linear.bias is None else linear(inputs) - linear.bias
            yield _error(name, output, inputs @ matrix.T, made)


def _error(what: str, found: Tensor, promised: Tensor, made: Checkpoint) -> float:
    error = ((found - promised).double().norm() / promised.double().norm().clamp_min(1e-30)).item()
    if not error <= LARGEST_ERROR:
        raise VerificationError(
            f"Loaded by transformers, {what} give {error:.2g} of their output's size something else than the matrices "
            f"in the files; at most {LARGEST_ERROR:g} is rounding. {_left(made)}"
        )
    return error


def _left(made: Checkpoint) -> str:
    return f"{made.path} has no {CONFIG}, so that nothing loads it. This is a defect of moetool: please report it."
