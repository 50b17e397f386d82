"""Names of the files that make up a checkpoint."""

import os
import re
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from moetool.errors import InvalidInputError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST = "moetool.json"
COSTS = "moetool/costs.json"
CARD = "README.md"
BASES = "base-[0-9]*.safetensors"  # of layers, that fisher-merge writes
ADAPTER = "adapter_config.json"  # of peft
WORK_DIRECTORY = ".moetool"  # of a run that is not finished

TOKENIZER = "tokenizer.json"
_PIECES_READ_BY = ("sentencepiece", "protobuf")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS = (*PICKLES, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".tflite")
UNFINISHED = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.tmp)?")
WORK_DIRECTORIES = frozenset({".git", ".cache", "__pycache__", ".ipynb_checkpoints", WORK_DIRECTORY})


def has_vocabulary(directory: Path) -> bool:
    """Whether a directory holds the files of a tokenizer, by their names."""
    stems = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "tekken", "tiktoken")
    return any(
        file.name.startswith(stems) or file.name.endswith((".model", ".tiktoken")) for file in directory.iterdir()
    )


def check_has_tokenizer(directory: Path) -> None:
    """Raise `InvalidInputError` unless a directory holds the files of a tokenizer, by their names, and the libraries
    are here that transformers reads these with."""
    if not has_vocabulary(directory):
        raise InvalidInputError(f"No tokenizer in {directory}: copy tokenizer.json and tokenizer_config.json there.")
    if (directory / TOKENIZER).exists():
        return
    lacking = [package for package in _PIECES_READ_BY if not any(distributions(name=package))]
    if lacking and (pieces := next(filter(_has_pieces, sorted(directory.glob("*.model"))), None)):
        raise InvalidInputError(
            f"The tokenizer of {directory} is one of SentencePiece ({pieces.name}), without {TOKENIZER}. transformers "
            f"reads it with more libraries: pip install {' '.join(lacking)}. Or copy {TOKENIZER} there."
        )


def _has_pieces(file: Path) -> bool:
    """Whether a file begins as a model of SentencePiece does. Others of that name are tiktoken's, which are text."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(1) == b"\n"


def sidecars_in(root: Path) -> Iterator[Path]:
    """Files below a checkpoint's directory that are neither its weights nor what describes it and no other."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in WORK_DIRECTORIES]
        for name in names:
            stem = name.removesuffix(".tmp").removesuffix(".index.json").lower()
            file = Path(directory) / name
            is_own = file == root / COSTS or (file.parent == root and name in (CONFIG, MANIFEST, CARD))
            if not stem.endswith(WEIGHTS) and not is_own:
                yield file
