"""Headers of a checkpoint that does not exist yet, from its `config.json` alone, to plan jobs on it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moetool.architectures.layers import decoder_layer
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.names import CONFIG, SINGLE
from moetool.checkpoint.promises import check_shape, lacking
from moetool.checkpoint.reader import Checkpoint, read_config
from moetool.checkpoint.source import resolve_source
from moetool.checkpoint.stored.formats import entry_of, expected_bytes
from moetool.checkpoint.stored.matrix import DecodedMatrix, Spans
from moetool.checkpoint.weight_files import has_weights
from moetool.checkpoint.writer import TensorSpec, shard_nbytes
from moetool.errors import InvalidInputError
from moetool.format.families import is_opaque
from moetool.format.marker import moetool_entry
from moetool.runtime.building import empty_model, names_on_disk
from moetool.runtime.loading import refuse_other_head


def open_for_planning(source: str | Path) -> Checkpoint:
    """A checkpoint whose headers are all that is needed: the real ones, or where there are no weight files (a hub id is
    not downloaded for this) the ones that follow from its config. Raises `InvalidInputError`."""
    path = resolve_source(source, weights=False)
    if has_weights(path) or not (path / CONFIG).exists():
        return replace(Checkpoint.open(path), source=str(source))
    return imagine(str(source), path, read_config(path)[1])


def check_promised(checkpoint: Checkpoint) -> Mapping[str, TensorInfo]:
    """The tensors that the config promises, by name. Raises `InvalidInputError` unless the files hold all of them, in
    these shapes."""
    promised = imagine(checkpoint.source, checkpoint.path, checkpoint.config).tensors
    shapes = {_today(name): info.shape for name, info in checkpoint.tensors.items()}
    if missing := [name for name, info in promised.items() if info.nbytes and name not in shapes]:
        refuse_other_head(checkpoint)
        raise lacking(checkpoint.source, missing, checkpoint.tensors)
    for name, info in promised.items():
        if name in shapes:
            check_shape(checkpoint.path, name, shapes[name], info.shape)
    return promised


def check_against_config(checkpoint: Checkpoint) -> None:
    """Raise `InvalidInputError` unless the files hold the tensors that the config promises, in these shapes, and no
    layers beyond them."""
    promised = check_promised(checkpoint)
    layers = {decoder_layer(name) for name in promised}
    lists = {layer.rpartition(".")[0] for layer in layers}
    for name in sorted(checkpoint.tensors.keys() - promised.keys()):
        if (layer := decoder_layer(name)) not in layers and layer.rpartition(".")[0] in lists:
            raise InvalidInputError(f"{checkpoint.path} has a tensor {name} of a layer that config.json does not know.")


def _today(name: str) -> str:
    """The name that transformers gives a tensor today: first BERTs on the hub have TensorFlow's for their norms."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def imagine(source: str, path: Path, config: dict[str, object]) -> Checkpoint:
    """The checkpoint that transformers would save for this config; its tensors cannot be read.

    Multi-token-prediction layers, which transformers does not have, are not among them.

    Raises:
        InvalidInputError: transformers cannot build the model.
    """
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), torch.bfloat16)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    promised = names_on_disk(empty_model(config if is_opaque(config) else plain, path, dtype))
    specs = [TensorSpec(name, own, shape) for name, (own, shape) in promised.items()]
    file = path / SINGLE
    tensors = {spec.name: TensorInfo(spec.name, spec.dtype, spec.shape, spec.nbytes, file, 0) for spec in specs}
    ordered = dict(sorted(tensors.items()))
    given = Checkpoint(source, path, config, ordered, (), shard_nbytes(specs), f"{CONFIG} alone", ())
    entry, shapes = entry_of(config, path), {spec.name: spec.shape for spec in specs}
    if entry is None or moetool_entry(config) is not None or (sizes := expected_bytes(config, shapes, path)) is None:
        return given
    forms = {name: _ImaginedMatrix(name, shapes[name], tensors[name].dtype, (name,)) for name in sizes}
    packed = {name: replace(tensors[name], dtype=torch.uint8, shape=(n,), nbytes=n) for name, n in sizes.items()}
    stored = {**ordered, **packed}
    nbytes = sum(info.nbytes for info in stored.values())
    told = str(entry.get("quant_method"))
    return replace(
        given, config=plain, weight_bytes=nbytes, forms=forms, stored=stored, stored_as=told, stored_entry=entry
    )


class _ImaginedMatrix(DecodedMatrix):
    """A matrix whose bytes are known, and nothing else of how it is stored."""

    def decode(self, spans: Spans, start: int, stop: int) -> Tensor:
        raise InvalidInputError(f"{self.name} cannot be read: there is nothing but {CONFIG}.")
