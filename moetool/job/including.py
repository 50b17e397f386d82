"""Quantization of weights beside the experts (`--include`): attention projections, embeddings and the head."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import TensorSpec, damaged, is_finite
from moetool.errors import UsageError
from moetool.format.beside import (
    GROUP,
    TENSORS,
    quantizable,
    quantized_beside,
    quantized_name,
    weight_of,
)
from moetool.format.kinds.base import PLACEHOLDER
from moetool.job.job import Input, Job, Source, to_cpu
from moetool.job.options import INCLUDED, IncludeOptions, KeepOptions, Options, bits_of_included
from moetool.kernels.operands import MOST_NUMBERS
from moetool.numerics.packing import pack, rows_served, unpack
from moetool.representations.measured import NOTHING, Measured
from moetool.representations.quantized import ROW_BITS, WHOLE, QuantizedMatrix

_MUCH = 0.03  # share of a result
FEW_BITS = 3.0  # for each number of an expert: with fewer, 8 bits for all else lose less than they leave to the experts
# Bits of all else, and the bits for each number of an expert that these have to leave, or fewer lose less.
_LEAST_LEFT = {8: 1.75, 6: 1.0, 5: 0.0}
_BLOCK = 4 << 20  # numbers of a matrix that are read at a time
_WIDE = (torch.float32, torch.bfloat16, torch.float16)

InputT = TypeVar("InputT", bound=Input)


def keeping(source: InputT, options: Options) -> InputT:
    """A source of which a job passes on what is in another tool's format as it is stored, if options say so."""
    keeps = isinstance(options, KeepOptions) and options.keep_stored and source.checkpoint.stored_entry is not None
    return replace(source, keeps_stored=True) if keeps and isinstance(source, Source) else source


def including(source: InputT, options: Options) -> InputT:
    """A source with what a job is to quantize of it beside its experts.

    Raises:
        UsageError: the model has nothing of what was asked for.
    """
    if not isinstance(source, Source) or not isinstance(options, IncludeOptions) or not options.include:
        return source
    chosen: dict[str, QuantizedMatrix] = {}
    for kind, bits in bits_of_included(options.include).items():
        weights = _weights(source, kind)
        if not weights:
            raise UsageError(
                f"--include {kind}: this {source.architecture.name} model has nothing of the kind that could be "
                "quantized. Leave it out."
            )
        chosen |= _due(source, weights, bits)
    return replace(source, included=chosen)


def included_in_words(source: Source) -> str:
    """What is to be quantized beside the experts, such as `attention in 6 bits and embeddings in 8 bits`: a matrix may
    need more bits than were asked for."""
    bits: dict[str, str] = {}
    for kind, modules in quantizable(source.architecture).items():
        if own := sorted({source.included[module].bits for module in modules if module in source.included}):
            bits[kind] = " and ".join(map(str, own))
    if len(set(bits.values())) == 1:
        return f"{' and '.join(bits)} in {next(iter(bits.values()))} bits"
    return " and ".join(f"{kind} in {own} bits" for kind, own in bits.items())


def bits_left(source: Source, output: int) -> float:
    """Bits for each number of the experts, scales and bases included, in weight files of `output` bytes that hold all
    else as a job passes it on."""
    infos = (source.checkpoint.info(weight_of(module)) for module in source.included)
    beside = source.bytes_beside_experts - sum(info.nbytes for info in infos) + included_bytes(source)
    return max(8 * (output - beside) / source.experts.numbers, 0.0)


def including_saves(source: Source, bits: int = WHOLE) -> dict[str, tuple[int, int]]:
    """Bytes that matrices of each kind of `INCLUDED` take in the model's dtype, and how many fewer they take in `bits`.

    What is quantized already, in the source or by `--include`, does not count.
    """
    found = {}
    for kind in INCLUDED:
        due = _due(source, _weights(source, kind), bits)
        due = {name: form for name, form in due.items() if name not in source.included}
        infos = {name: source.checkpoint.tensors[weight_of(name)] for name in due}
        before = sum(info.nbytes for info in infos.values())
        after = sum(due[name].nbytes((info.shape[0], info.shape[1]), info.dtype) for name, info in infos.items())
        if due:
            found[kind] = before, before - after
    return found


def worth_including(source: Source, output: int) -> dict[str, int]:
    """Bits for each kind of `INCLUDED` that a model has, where these save a good part of `output` bytes for experts
    that would have few bits otherwise; none else."""
    saves = including_saves(source)
    is_much = sum(saved for _, saved in saves.values()) >= _MUCH * output
    if not is_much or bits_left(source, output) >= FEW_BITS:
        return {}
    bits = next(bits for bits, least in _LEAST_LEFT.items() if _left_with(source, output, bits) >= least)
    return dict.fromkeys(saves, bits)


def _left_with(source: Source, output: int, bits: int) -> float:
    """Bits that are left for each number of the experts where all kinds of `INCLUDED` are stored in so many `bits`."""
    return bits_left(source, output + sum(saved for _, saved in including_saves(source, bits).values()))


def included_shapes(source: Source) -> list[list[tuple[int, int]]]:
    """Shapes `[out, in]` of the matrices that are included, layer by layer; of those outside of all layers last."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(source.architecture.layers + 1)]
    for module in source.included:
        rows, columns = source.checkpoint.info(weight_of(module)).shape
        found[source.architecture.layer_of(module)].append((rows, columns))
    return found


def included_bytes(source: Source) -> int:
    """Bytes of the codes and scales of all that is included."""
    infos = {module: source.checkpoint.info(weight_of(module)) for module in source.included}
    return sum(
        form.nbytes((infos[module].shape[0], infos[module].shape[1]), infos[module].dtype)
        for module, form in source.included.items()
    )


def _weights(source: Source, kind: str) -> dict[str, TensorInfo]:
    """Headers of the matrices of a kind that are stored in 16 or 32 bits, by the module that holds them."""
    names = quantizable(source.architecture)[kind]
    found = {name: source.checkpoint.tensors.get(weight_of(name)) for name in names}
    return {name: info for name, info in found.items() if info is not None and info.dtype in _WIDE}


def _due(source: Source, weights: Mapping[str, TensorInfo], bits: int) -> dict[str, QuantizedMatrix]:
    """Forms, with codes of so many `bits` where they can be, of those of the matrices that are not in codes already."""
    done, kept = quantized_beside(source.checkpoint.settings), source.checkpoint.forms if source.keeps_stored else {}
    due = {name: info for name, info in weights.items() if name not in done and weight_of(name) not in kept}
    return {name: _form((info.shape[0], info.shape[1]), bits) for name, info in due.items()}


def _form(shape: tuple[int, int], bits: int) -> QuantizedMatrix:
    """Codes of so many `bits` with the largest groups up to 128; a scale per row where only groups of one would fit.
    Of more bits if rows cannot share bytes, or are too many for kernels of cards to take together."""
    own = [more for more in ROW_BITS if more >= bits]
    fitting = next(
        more for more in own if more == WHOLE or (shape[0] % rows_served(more) == 0 and math.prod(shape) < MOST_NUMBERS)
    )
    try:
        return QuantizedMatrix(fitting, GROUP).fitted(shape)
    except ValueError:
        return QuantizedMatrix(fitting, 0)


def included_specs(source: Source, spec: TensorSpec) -> list[TensorSpec]:
    """Headers of the tensors that replace one: codes, scales and a placeholder, or the tensor itself if it stays."""
    if (form := source.included.get(spec.name.removesuffix(".weight"))) is None:
        return [spec]
    rows, columns = spec.shape
    stored = form.tensors((rows, columns))
    parts = [
        (quantized_name(spec.name, name), stored[name].dtype or spec.dtype, stored[name].shape) for name in TENSORS
    ]
    return [TensorSpec(*part) for part in (*parts, (spec.name, spec.dtype, PLACEHOLDER))]


def included_tensors(job: Job[Source], written: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the place of those that are quantized, of those whose names are `written`: with the codes that
    were chosen on a text, or the nearest."""
    source = job.source
    for module, form in source.included.items():
        if (weight := weight_of(module)) in written:
            yield weight, torch.zeros(PLACEHOLDER, dtype=source.checkpoint.tensors[weight].dtype)
            path = included_path(job.work, module)
            made = load_file(path) if path.exists() else encoded(source.checkpoint, weight, form)
            for tensor in TENSORS:
                yield quantized_name(weight, tensor), made[tensor]


def included_path(work: Path, module: str) -> Path:
    """The file in which the codes of a module that were chosen on a text wait until they are written to the result."""
    return work / f"included-{module}.safetensors"


def encoded(
    checkpoint: Checkpoint, weight: str, form: QuantizedMatrix, measured: Measured = NOTHING
) -> dict[str, Tensor]:
    """Codes and scales of a matrix, by its `measured` inputs if there are any. Some rows are in memory at a time.

    Raises:
        InvalidInputError: the matrix has values that are not finite.
    """
    info = checkpoint.info(weight)
    rows, columns = info.shape
    step = max(1, _BLOCK // columns)
    codes, scales = [], []
    for start in range(0, rows, step):
        block = checkpoint.read_rows(weight, start, min(start + step, rows))
        if not is_finite(block):
            raise damaged(weight, checkpoint.path)
        block = block if measured.gram is None else block.to(measured.gram.device)
        made = {tensor: to_cpu(part) for tensor, part in form.encode(block, info.dtype, measured).items()}
        codes.append(unpack(made["codes"], form.bits, block.numel()))
        scales.append(made["scales"])
    return {"codes": pack(torch.cat(codes), form.bits), "scales": torch.cat(scales)}
