"""The file by which Ollama takes in a GGUF file.

Source: https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx.
"""

import json
from collections.abc import Mapping
from pathlib import Path

_POSITIONS = 8192  # at most, since memory is taken for all of them; without a number there are 2048
# Entries of `generation_config.json` and what Ollama calls them.
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def modelfile(model: str, positions: int | None, given: Mapping[str, object], *, has_template: bool) -> str:
    """Content of the Modelfile beside a GGUF file.

    Args:
        model: name of the GGUF file, in the same folder.
        positions: that the model has, if that is known.
        given: entries of its `generation_config.json`.
        has_template: whether the GGUF file has a chat template. Without one the model is to go on with the text itself.
    """
    lines = ["# ollama create NAME -f Modelfile", f"FROM ./{model}"]
    if positions is not None:
        lines.append(f"PARAMETER num_ctx {min(positions, _POSITIONS)}")
    for entry, name in _PARAMETERS.items():
        value = given.get(entry)
        if isinstance(value, int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {name} {value:g}")
    if not has_template:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    return "\n".join(lines) + "\n"


def generation_defaults(directory: Path) -> dict[str, object]:
    """Entries of a checkpoint's `generation_config.json`; none where it cannot be read, which transformers tells of
    where it matters."""
    from transformers.utils import GENERATION_CONFIG_NAME

    try:
        found = json.loads((directory / GENERATION_CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
