"""List the model families of the installed transformers that have experts, by reading its modeling files."""

import re
from pathlib import Path

_MODELS = re.compile(r"^class (\w+ForCausalLM)\(", re.MULTILINE)
_EXPERTS = re.compile(r"^class \w*Experts\w*\(nn\.Module\)", re.MULTILINE)


def families_with_experts() -> dict[str, list[str]]:
    """Model types of each family of transformers that has a class of experts, or is run by another that has, by the
    name of its directory: those of language models, alone or inside others, or all types where there is no language
    model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    directory = Path(transformers.__file__).parent / "models"
    code = {
        family.name: "\n".join(file.read_text(encoding="utf-8") for file in family.glob("modeling_*.py"))
        for family in sorted(directory.iterdir())
    }
    types: dict[str, list[str]] = {family: [] for family, own in code.items() if _EXPERTS.search(own)}
    classes = {name: family for family in types for name in _MODELS.findall(code[family])}
    for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        family = model_type_to_module_name(name)
        if not code.get(family) and model in classes:  # it has a config alone, and is run by another family's class
            types[family] = []
    for name in CONFIG_MAPPING_NAMES:
        if (family := model_type_to_module_name(name)) in types:
            types[family].append(name)
    speaking = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return {family: [own for own in names if own in speaking] or names for family, names in sorted(types.items())}
