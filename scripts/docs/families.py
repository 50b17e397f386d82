"""Writes docs/families.md: every MoE family that the installed transformers has, every dense one, and what moetool does
with it.

python scripts/docs/families.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from moetool.architectures import find_architecture
from moetool.architectures.base import experts_told
from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.listing import families_with_experts
from moetool.errors import InvalidInputError
from moetool.format.gguf.families import GGUF_FAMILIES, READ
from moetool.format.gguf.family import GgufFamily
from moetool.quiet import quiet

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "families.md"
sys.path.insert(0, str(ROOT / "tests"))
import around_dense  # noqa: E402
import around_families  # noqa: E402
import dense_families  # noqa: E402
import derived_dense  # noqa: E402
import derived_families  # noqa: E402
import families  # noqa: E402
import gguf_models  # noqa: E402

HEADER = """# Model families

Every family in transformers {version} that has a class of experts, {count} of them, and what moetool does with it.
`make docs` writes this page; a test compares it with what is installed. What moetool needs to know of a model is
derived from transformers' own class, by `config.json` alone.

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
Nemotron 3's and Muse Spark's are given fewer channels than hidden states have; Muse Spark's end in a norm that they
share. Inkling's router also weighs shared experts, ZAYA1's may choose none, LongCat-Flash's also chooses experts
without matrices, which give back what they are given: these rows of it stay, and what they do stays exact. Of
LongCat-Flash, transformers 5.24.0 wants matrices that no file has, and loads no published model; where moetool is
imported it does. JetMoE's attention has experts, too, which stay as they are; `config.json` has one number for both, so
that `reap` and its like are refused. The matrices of all experts of a DBRX layer lie below each other in one, in files.
In memory DBRX's and JetMoE's experts are in modules of the usual form, where moetool is imported; and DBRX has the
rotary base of its `attn_config`, as it was trained: transformers 5.24.0 reads another entry, and takes its default.

Compressed, all run on the same kernels; every expert keeps its own biases. Where only gate and up or only down of a
transposed layer is compressed, and where experts end in a norm, the layer runs without kernels.

Where layers hand more than hidden states to each other (GLM-5 and HY-V4 with shared indexers, as HY-V4 has by default;
Gemma 4 with shared keys and values), calibration is refused.

*GGUF*: the architecture that `export --format gguf` writes for llama.cpp; a tiny random model's logits in llama.cpp are
compared with transformers' (`tests/integration/test_cli_gguf_families.py`). {written} families have one. Files
of those with *(read)* behind it can be inputs, too: what is read of a tiny model's has its logits.

| family | `model_type` | what was run, or why it is refused | GGUF |
|---|---|---|---|
"""

DENSE_HEADER = """
# Dense families

Of the {count} other model types in transformers {version} that have a causal language model, or that `moefy` takes,
{taken} go through `upcycle` and `moefy`, and {alone} through `moefy` alone, each by a tiny random model: upcycled to
the same logits and made dense again to the same bytes, moefied and verified. *Derived* means that the networks are
found and nothing was run. {written} have an architecture that `export --format gguf` writes (*GGUF*), and the same
logits in llama.cpp.

| `model_type` | what was run, or why it is refused | GGUF |
|---|---|---|
"""
AROUND_HEADER = """
# Dense language models in models that see or hear

`upcycle` and `moefy` refuse them; `export --format gguf` writes the language model alone, and llama.cpp has the same
logits of a tiny random model of each of these {count}. Other models that see are taken where transformers has a class
for pictures and text of them, and their language model has a *GGUF* above.

| `model_type` | language model | GGUF |
|---|---|---|
"""
# Model types whose networks are found, and which a job refuses all the same.
REFUSED_LATER = {"cpmant": "its layers see more than the tokens of a text: a prompt of its own comes before each"}


def dense_types() -> tuple[set[str], set[str]]:
    """Model types that are run through upcycle and moefy, and those that are run through moefy alone."""
    run = {own for own, _ in dense_families.DENSE_FAMILIES.values()} | set(derived_dense.DERIVED_DENSE)
    return run, ({own for own, _ in dense_families.MOEFY_FAMILIES.values()} | set(derived_dense.ENCODERS)) - run


def dense_rows() -> Iterator[tuple[str, str]]:
    """Model type, and what was run or why it is refused."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    run, alone = dense_types()
    others = {name for names in families_with_experts().values() for name in names} - run
    for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *run, *alone} - others):
        if name in run | alone:
            yield name, "upcycle, moefy" if name in run else "moefy"
        else:
            yield name, dense_reason(name)


def dense_reason(model_type: str) -> str:
    """Why a dense family is refused, or that it is derived."""
    if (why := REFUSED_LATER.get(model_type)) is not None:
        return f"refused: {why}."
    try:
        with quiet():
            find_dense_architecture(AutoConfig.for_model(model_type).to_dict())
    except InvalidInputError as error:
        return f"refused: {error}"
    except Exception as error:  # defaults that make no model
        return f"not tried: transformers' own defaults make no model ({' '.join(str(error).split())[:80]} …)."
    return "derived"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Family, model type, what was run (empty if it is refused), and why it is refused."""
    tested = {
        **dict.fromkeys(families.FAMILIES, "all"),
        **dict.fromkeys(derived_families.DERIVED, "contract"),
        **dict.fromkeys(around_families.AROUND, "contract, whole"),
    }
    for family, names in families_with_experts().items():
        if run := [name for name in names if name in tested]:
            for name in run:
                yield family, name, tested[name], ""
            continue
        name = next((name for name in names if name.endswith("_text")), names[0])
        yield family, name, "", reason(name)


def reason(model_type: str) -> str:
    """Why a family is refused."""
    with quiet():
        config: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    config |= {"num_experts": 8} if experts_told(config) is None else {}
    try:
        find_architecture(config)
    except InvalidInputError as error:
        return str(error)
    raise AssertionError(f"{model_type} is not refused: give it a tiny config in tests/derived_families.py")


def in_gguf(model_type: str) -> str:
    """llama.cpp's name of the architecture; empty if moetool writes none."""
    with quiet():
        inner = AutoConfig.for_model(model_type).get_text_config().model_type
    return _named([one for one in GGUF_FAMILIES if one.model_type == inner])


def dense_in_gguf(model_type: str) -> str:
    """The same of a model without experts."""
    return _named([one for one in GGUF_FAMILIES if not one.is_moe and one.model_type == model_type])


def _named(known: list[GgufFamily]) -> str:
    """The architecture of the first of these, and whether its files are read."""
    if not known:
        return ""
    is_read = known[0].model_type in {*READ, *gguf_models.READ_AS_ANOTHER}
    return f"{known[0].architecture}{' (read)' if is_read else ''}"


def text() -> str:
    found = list(rows())
    taken = {family for family, _, run, _ in found if run}
    written = {name: in_gguf(name) for _, name, run, _ in found if run}
    count, files = len(families_with_experts()), {family for family, name, run, _ in found if run and written[name]}
    head = HEADER.format(version=transformers.__version__, count=count, taken=len(taken), written=len(files))
    lines = [
        f"| {family} | `{name}` | {run or f'refused: {why}'} | {written.get(name, '')} |"
        for family, name, run, why in found
    ]
    return head + "\n".join(lines) + "\n" + dense_text()


def dense_text() -> str:
    """The second half of the page, of dense families."""
    found, (run, alone) = list(dense_rows()), dense_types()
    in_files = {name: dense_in_gguf(name) for name, _ in found}
    counts = {"count": len(found), "taken": len(run), "alone": len(alone), "written": sum(map(bool, in_files.values()))}
    head = DENSE_HEADER.format(version=transformers.__version__, **counts)
    return head + "\n".join(f"| `{name}` | {told} | {in_files[name]} |" for name, told in found) + "\n" + around_text()


def around_text() -> str:
    """The end of the page, of dense language models in others."""
    found = sorted({(name.partition("/")[0], str(inner["model_type"])) for name, inner in _within()})
    lines = [f"| `{around}` | `{inner}` | {dense_in_gguf(inner)} |" for around, inner in found]
    return AROUND_HEADER.format(count=len({around for around, _ in found})) + "\n".join(lines) + "\n"


def _within() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in around_dense.AROUND_DENSE:
        yield name, around_dense.text_config(name.partition("/")[2])


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
