"""Recognition of moetool's checkpoints by `quant_method` in the `quantization_config` of their `config.json`."""

from collections.abc import Mapping

METHOD = "moetool"
FORMAT_VERSION = 3  # the newest
BESIDE = "beside"  # what is quantized beside experts, which the first version did not know
STORED = "stored"  # the source's own quantization_config, of tensors that were passed on; the third version knows it
OWN = ".moetool."  # in the names of moetool's own tensors, which no other tool's format has


def version_of(entry: Mapping[str, object]) -> int:
    """The oldest format version whose readers know all of an entry."""
    return 3 if entry.get(STORED) else 2 if entry.get(BESIDE) else 1


def moetool_entry(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The `quantization_config` of a moetool checkpoint, `None` for any other."""
    entry = config.get("quantization_config")
    if isinstance(entry, Mapping) and entry.get("quant_method") == METHOD:
        return entry
    return None


def without_stored(config: Mapping[str, object]) -> dict[str, object]:
    """A `config.json` of the matrices that tensors in another tool's format stand for, without that format."""
    if (entry := moetool_entry(config)) is None:
        return {key: value for key, value in config.items() if key != "quantization_config"}
    left = {key: value for key, value in entry.items() if key != STORED}
    return {**config, "quantization_config": {**left, "format_version": version_of(left)}}


def with_stored(config: Mapping[str, object], stored: Mapping[str, object]) -> dict[str, object]:
    """The `config.json` of a result some of whose tensors are in another tool's format, with what that tool said."""
    entry = {**(moetool_entry(config) or {"quant_method": METHOD, "layers": {}}), STORED: dict(stored)}
    return {**config, "quantization_config": {**entry, "format_version": version_of(entry)}}
