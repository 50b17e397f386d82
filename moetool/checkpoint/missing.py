"""Error messages for directories that lack a config or weights, or have an adapter, and so are no checkpoint."""

import json
import shlex
from pathlib import Path

from moetool.checkpoint.gguf import gguf_files
from moetool.checkpoint.names import (
    ADAPTER,
    BASES,
    CONFIG,
    INDEX,
    MANIFEST,
    PICKLES,
    SINGLE,
    UNFINISHED,
    WORK_DIRECTORY,
)


def without_config(path: Path) -> str:
    """A sentence that says what a directory without `config.json` holds, and what to give instead."""
    if (path / ADAPTER).exists():
        return _adapter_alone(path)
    if (path / WORK_DIRECTORY).exists():
        return f"{path} holds an unfinished run. Finish it: repeat its command with --resume."
    if files := gguf_files(path):
        return _several_files(path, CONFIG, files)
    if is_base(path):
        return (
            f"{path} is no model, but the base that fisher-merge made of a model's experts: `moetool decompose MODEL "
            f"OUTPUT --base {shlex.quote(str(path))}` takes it."
        )
    if not any(path.iterdir()):
        return f"{path} is empty; expected a checkpoint with {CONFIG} and {SINGLE}."
    return f"{path} has no {CONFIG}, so it is not a checkpoint of a Hugging Face model."


def _several_files(path: Path, lacks: str, files: list[Path]) -> str:
    """What to do with a directory of GGUF files; were there one, it would have been read."""
    named = ", ".join(file.name for file in files)
    return f"{path} has no {lacks}, but {len(files)} GGUF files ({named}): give one of them, such as {files[0]}."


def is_base(path: Path) -> bool:
    """Whether a directory holds the base that `fisher-merge` made of a model's experts, and no model."""
    return (path / MANIFEST).exists() and not (path / CONFIG).exists() and any(path.glob(BASES))


def _adapter_alone(path: Path) -> str:
    """What to do with an adapter where a model is expected."""
    try:
        base = json.loads((path / ADAPTER).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        base = None
    of = base if isinstance(base, str) and base else "another model"
    made = f"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained({json.dumps(str(path))})"
    line = shlex.quote(f'{made}.merge_and_unload().save_pretrained("MERGED")')
    return (
        f"{path} is an adapter of {of}, not a model. Merge it first (python -c {line}, then copy "
        "the tokenizer's files of its base to MERGED) and give MERGED; or make "
        "experts of several adapters: moetool upcycle BASE OUTPUT --method branch-train-mix --source ADAPTER …"
    )


def with_adapter(path: Path) -> str:
    """Why a model cannot be taken that has an adapter beside it, and what to do about it."""
    return (
        f"{path} is a model with an adapter beside it ({ADAPTER}), which transformers would apply while it loads the "
        f"model, and moetool does not read. Merge it (peft: merge_and_unload), or move {ADAPTER} elsewhere if the "
        "model is meant without it or has it in its weights."
    )


def without_weights(path: Path) -> str:
    """Why a directory has no weights that can be read, and what to do about it, in sentences."""
    if (path / ADAPTER).exists():
        return _adapter_alone(path)
    names = sorted(file.name for file in path.iterdir())
    if shards := [name for name in names if UNFINISHED.fullmatch(name)]:
        return (
            f"{path} has {shards[0]} but neither {SINGLE} nor {INDEX}: "
            "the run or download that was writing it is not finished. Finish it."
        )
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{path} has its weights only as pickles ({pickles[0]}), which can run code when read; moetool never reads "
            "them. If you trust their origin, convert them with "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`, which writes safetensors."
        )
    if files := gguf_files(path):
        return _several_files(path, "safetensors weights", files)
    found = f" Found {', '.join(names[:8])}{' …' if len(names) > 8 else ''}."
    return f"{path} has no safetensors weights: expected {SINGLE}, or {INDEX} and its shards.{found}"
