"""LoRA adapters as models: merged into the model they were trained on, by peft."""

import hashlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from moetool.checkpoint.files import storage_problem
from moetool.checkpoint.header import read_header
from moetool.checkpoint.json_files import read_object
from moetool.checkpoint.names import ADAPTER, CONFIG, INDEX, SINGLE
from moetool.checkpoint.permissions import open_to_readers
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import resolve_source
from moetool.errors import InvalidInputError, in_one_line

_WEIGHTS = "adapter_model.safetensors"


def adapter_fingerprint(path: Path) -> str:
    """SHA-256 over an adapter's config and weights, in hexadecimal."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("adapter_*")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def merge_adapter(adapter: Path, base: Checkpoint, target: Path) -> None:
    """The model that `base` is with an adapter, written to `target`. The whole model is in memory meanwhile.

    Raises:
        InvalidInputError: the adapter does not fit the model, or cannot be read.
        ResourceError: the disk is full.
    """
    from peft import PeftConfig, get_peft_model

    from moetool.quiet import quiet
    from moetool.runtime.loading import load_model

    model = load_model(base, "auto")
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft about transformers
            adapted = get_peft_model(model, PeftConfig.from_pretrained(adapter))
            told = adapted.load_adapter(adapter, "default")
            _refuse_partly({"it lacks": told.missing_keys, "the model has no place for": told.unexpected_keys})
            merged = adapted.merge_and_unload()
            shutil.rmtree(target, ignore_errors=True)
            merged.save_pretrained(target)
            open_to_readers(*target.glob("*.safetensors"))
    except Exception as error:  # of four libraries
        if (explained := storage_problem(error, target)) is not None:
            raise explained from error
        raise InvalidInputError(
            f"Adapter {adapter} cannot be merged into {base.path}: {in_one_line(error, 400)}"
        ) from error
    del model, adapted, merged
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _refuse_partly(wrong: Mapping[str, Sequence[str]]) -> None:
    """Raise for what peft says nothing of, or only warns of."""
    if problems := [f"{what} {len(names)} tensors ({sorted(names)[0]} …)" for what, names in wrong.items() if names]:
        raise ValueError("; ".join(problems))


def open_adapter(source: str) -> Path | None:
    """The directory of an adapter, or `None` for what is a model. Raises `InvalidInputError` for neither."""
    path = resolve_source(source, weights=False)
    if not (path / CONFIG).exists() and not (path / ADAPTER).exists():
        path = resolve_source(source)  # on the hub, where an adapter has no config.json to begin with
    is_model = (path / CONFIG).exists() and any((path / name).exists() for name in (SINGLE, INDEX))
    if is_model or not (path / ADAPTER).exists():
        return None
    kind = read_object(path / ADAPTER, lambda: f"{path} has no {ADAPTER}.")[1].get("peft_type")
    if not (path / _WEIGHTS).exists():
        raise InvalidInputError(f"{path} has no {_WEIGHTS}: the adapter has no weights that moetool reads.")
    read_header(path / _WEIGHTS)
    if kind != "LORA":
        raise InvalidInputError(f"{path} is an adapter of type {kind}; only LoRA can be merged into a model.")
    return path
