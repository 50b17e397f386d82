"""How a checkpoint of moetool's is known: `quant_method` in the entry `quantization_config` of its `config.json`."""

from collections.abc import Mapping

METHOD = "moetool"
FORMAT_VERSION = 1


def moetool_entry(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The `quantization_config` of a moetool checkpoint, `None` for any other."""
    entry = config.get("quantization_config")
    if isinstance(entry, Mapping) and entry.get("quant_method") == METHOD:
        return entry
    return None
