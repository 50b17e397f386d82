"""Writes docs/families.md: every MoE family that the installed transformers has, and what moetool does with it.

python scripts/docs/families.py
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from moetool.architectures import architectures, find_architecture
from moetool.architectures.base import experts_told
from moetool.errors import InvalidInputError
from moetool.quiet import quiet

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "families.md"
sys.path.insert(0, str(ROOT / "tests"))
import around_families  # noqa: E402
import derived_families  # noqa: E402
import families  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS = re.compile(r"^class \w*Experts\w*\(nn\.Module\)", re.MULTILINE)
HEADER = """# MoE families

Every family in transformers {version} that has a class of experts, {count} of them, and what moetool does with it.
`make docs` writes this page; a test compares it with what is installed. What moetool needs to know of a family it reads
from transformers' own class, by `config.json` alone (*derived*), or has in a file of its own in `moetool/architectures`
(*written*).

{taken} families go through the commands, each by a tiny random model. *All*: `tests/integration/test_cli_families.py`
compresses it in one command and by hand, kills and resumes that, evaluates, inspects, verifies, exports and loads it.
*Contract*: `test_cli_derived.py` keeps everything (the same logits to 1e-5 in fp32), compresses (`d2moe`, `hybrid`,
`quantize`), evaluates and verifies against the original, exports `dense-experts`, loads it in transformers, and takes
experts away (`reap`). DeepSeekMoE-16B, which transformers does not run, is taken too (*all*).

Of a model that also sees or hears (*whole*), the language model is calibrated on text alone and compressed; every other
tensor stays as it is, byte for byte, and so does the rest of `config.json`. It loads as before, by
`AutoModelForImageTextToText`, and by `AutoModelForCausalLM` where transformers has the language model there. A
`model_type` that ends in `_text` stands for the language model alone. The experts of Qwen3-VL-MoE (turned round) and
Qwen3.5-MoE (in one tensor) are read, and written again, as they lie on the hub or as transformers saves them.

So are those that lie otherwise in memory, too: gpt-oss's are transposed, have biases, and their gate and up rows take
turns (in MXFP4 or in 16 bits); Aria's and Llama 4's are transposed. Nemotron-H's have no gate. Llama 4's router weighs
what experts are given, and experts of a class without transformers' decorator are tried on small numbers first.
Compressed, they run on the same kernels as all others; every expert keeps its own biases. Where only gate and up or
only down of a transposed layer is compressed, the layer runs without kernels.

Where layers hand more than hidden states to each other (GLM-5 and HY-V4 with shared indexers, as HY-V4 has by default;
Gemma 4 with shared keys and values), calibration is refused.

| family | `model_type` | how | what was run, or why it is refused |
|---|---|---|---|
"""


def model_types() -> dict[str, list[str]]:
    """By family (a directory of transformers' with a class of experts), its model types."""
    having = [
        path.name
        for path in sorted(MODELS.iterdir())
        if any(EXPERTS.search(file.read_text(encoding="utf-8")) for file in path.glob("modeling_*.py"))
    ]
    types: dict[str, list[str]] = {family: [] for family in having}
    for name in CONFIG_MAPPING_NAMES:
        if (family := model_type_to_module_name(name)) in types:
            types[family].append(name)
    return types


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Family, model type, how moetool knows it, and what was run; empty if it is refused, then why."""
    written = {name for family in architectures() for name in family.model_types}
    tested = {
        **dict.fromkeys(families.FAMILIES, "all"),
        **dict.fromkeys(derived_families.DERIVED, "contract"),
        **dict.fromkeys(around_families.AROUND, "contract, whole"),
    }
    for family, names in model_types().items():
        if run := [name for name in names if name in tested]:
            for name in run:
                yield family, name, "written" if name in written else "derived", tested[name]
            continue
        alone = [name for name in names if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        seeing = [name for name in names if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
        name = next((name for name in alone if name.endswith("_text")), [*alone, *seeing, *names][0])
        yield family, name, "", reason(name)


def reason(model_type: str) -> str:
    """Why a family is refused."""
    more = {"attn_config": {"rope_theta": 1e4}} if model_type == "dbrx" else {}  # its defaults make no model
    with quiet():
        config: dict[str, Any] = AutoConfig.for_model(model_type, **more).to_dict()
    config |= {"num_experts": 8} if experts_told(config) is None else {}
    try:
        find_architecture(config)
    except InvalidInputError as error:
        return str(error)
    raise AssertionError(f"{model_type} is not refused: give it a tiny config in tests/derived_families.py")


def text() -> str:
    found = list(rows())
    taken = {family for family, _, how, _ in found if how}
    head = HEADER.format(version=transformers.__version__, count=len(model_types()), taken=len(taken))
    lines = [f"| {family} | `{name}` | {how or 'refused'} | {what} |" for family, name, how, what in found]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
