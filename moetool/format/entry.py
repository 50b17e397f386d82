"""Reading and writing of moetool's entry `quantization_config` in a `config.json`."""

from collections.abc import Mapping
from types import MappingProxyType

from moetool.architectures.base import Settings
from moetool.errors import InvalidInputError
from moetool.format.families import architecture_of
from moetool.format.kinds import CustomModule
from moetool.format.layout import LayerLayout
from moetool.format.marker import FORMAT_VERSION, METHOD, moetool_entry, version_of
from moetool.format.mlx import said_by_mlx

_OLD = "compression_config"


def with_usual_entry(config: Mapping[str, object]) -> dict[str, object]:
    """A `config.json` with what another tool says of the weights' format under `quantization_config`, where all say it
    today: llm-compressor called it `compression_config` in 2024, some models that see have it in `text_config`, and
    mlx-lm has it under `quantization`, too, and gives it no name."""
    moved = {key: value for key, value in config.items() if key != _OLD}
    found = config.get("quantization_config") or _compressed(config.get(_OLD))
    if (by_mlx := said_by_mlx(config)) is not None and moetool_entry(config) is None:
        moved.pop("quantization", None)
        found = by_mlx
    if isinstance(text := config.get("text_config"), Mapping):
        moved["text_config"] = {key: value for key, value in text.items() if key not in (_OLD, "quantization_config")}
        found = found or text.get("quantization_config") or _compressed(text.get(_OLD))
    return {**moved, "quantization_config": found} if found else moved


def _compressed(entry: object) -> dict[str, object] | None:
    """The `quantization_config` that a `compression_config` stands for; `None` where it says that weights are as they
    were."""
    if not isinstance(entry, Mapping):
        return None
    sparsity = entry.get("sparsity_config")
    is_sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    return {"quant_method": "compressed-tensors", **entry} if entry.get("config_groups") or is_sparse else None


def is_quantized_elsewhere(config: Mapping[str, object]) -> bool:
    """Whether weights are in a format that is not moetool's, by another tool or an export."""
    return config.get("quantization_config") is not None and moetool_entry(config) is None


def check_unquantized(config: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for a checkpoint that another tool has quantized."""
    entry = config.get("quantization_config")
    if is_quantized_elsewhere(config):
        method = entry.get("quant_method", "unknown") if isinstance(entry, Mapping) else entry
        raise InvalidInputError(
            f"This checkpoint is already quantized (quant_method '{method}'). moetool needs the weights in 16 or 32 "
            "bits, or in a format that it decodes (FP8, MXFP8, MXFP4, compressed-tensors, GPTQ, AWQ, AutoRound, MLX, "
            "bitsandbytes, ModelOpt, Quark): take the unquantized checkpoint, or dequantize this one first."
        )


def check_format_version(entry: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for a checkpoint written by a newer moetool."""
    version = entry.get("format_version", 1)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise InvalidInputError(
            f"This checkpoint has moetool format version {version}; this moetool reads up to {FORMAT_VERSION}. "
            "Upgrade moetool."
        )


def layer_layouts(config: Settings) -> dict[int, LayerLayout]:
    """The layout of every layer that is not stored natively, by layer.

    Raises:
        InvalidInputError: the entry lists layers the model does not have, or cannot be read.
    """
    entry = moetool_entry(config)
    if entry is None:
        return {}
    check_format_version(entry)
    if not (layers := entry.get("layers")):
        return {}
    if not isinstance(layers, Mapping):
        raise InvalidInputError(f"quantization_config.layers must be an object by layer, not {layers!r}.")
    architecture = architecture_of(config)
    shape, count = architecture.shape, architecture.layers
    names = {str(layer): layer for layer in range(count)}
    if absent := [key for key in layers if key not in names]:
        raise InvalidInputError(
            f"quantization_config.layers has {absent[0]!r}; the layers of this model are 0 to {count - 1}."
        )
    layouts = {}
    for key, layout in layers.items():
        try:
            layouts[names[key]] = LayerLayout.from_config(shape, layout)
        except InvalidInputError as error:
            raise InvalidInputError(f"quantization_config, layer {key}: {error}") from error
    return layouts


def custom_entry(spec: CustomModule) -> dict[str, object]:
    """The `quantization_config` of a model with custom modules, all its experts stored natively."""
    return {"quant_method": METHOD, "format_version": 1, spec.key: spec.to_config()}


def format_entry(
    layouts: Mapping[int, LayerLayout],
    spec: CustomModule | None = None,
    more: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """The `quantization_config` to write for these layouts, of experts of custom modules if there is a spec of them;
    native layers are left out."""
    layers = {str(layer): layout.to_config() for layer, layout in sorted(layouts.items()) if not layout.is_native}
    custom = {} if spec is None else {spec.key: spec.to_config()}
    return {"quant_method": METHOD, "format_version": version_of(more), **custom, **more, "layers": layers}
