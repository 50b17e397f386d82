"""List the model families of the installed transformers that have experts, by reading its modeling files."""

import re
from pathlib import Path

_EXPERTS = re.compile(r"^class \w*Experts\w*\(nn\.Module\)", re.MULTILINE)


def families_with_experts() -> dict[str, list[str]]:
    """Model types of each family of transformers that has a class of experts, by the name of its directory: those of
    language models, alone or inside others, or all types where there is no language model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    types: dict[str, list[str]] = {
        path.name: []
        for path in sorted((Path(transformers.__file__).parent / "models").iterdir())
        if any(_EXPERTS.search(file.read_text(encoding="utf-8")) for file in path.glob("modeling_*.py"))
    }
    for name in CONFIG_MAPPING_NAMES:
        if (family := model_type_to_module_name(name)) in types:
            types[family].append(name)
    speaking = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return {family: [name for name in names if name in speaking] or names for family, names in types.items()}
