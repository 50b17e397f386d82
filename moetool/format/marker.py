"""Recognition of moetool's checkpoints by `quant_method` in the `quantization_config` of their `config.json`."""

from collections.abc import Mapping

METHOD = "moetool"
FORMAT_VERSION = 2  # the newest
BESIDE = "beside"  # what is quantized beside experts, which the first version did not know


def version_of(entry: Mapping[str, object]) -> int:
    """The oldest format version whose readers know all of an entry."""
    return FORMAT_VERSION if entry.get(BESIDE) else 1


def moetool_entry(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The `quantization_config` of a moetool checkpoint, `None` for any other."""
    entry = config.get("quantization_config")
    if isinstance(entry, Mapping) and entry.get("quant_method") == METHOD:
        return entry
    return None
