"""The weight files of a checkpoint's directory: which they are, and what tensors they hold."""

from collections.abc import Iterable
from pathlib import Path

from moetool.checkpoint.header import Header, TensorInfo, read_header
from moetool.checkpoint.json_files import read_object
from moetool.checkpoint.missing import without_weights
from moetool.checkpoint.names import INDEX, SINGLE, WEIGHTS
from moetool.errors import InvalidInputError

_LONGEST_NAME = 255  # of a file, on every system that there is


def has_weights(path: Path) -> bool:
    """Whether a directory holds weight files in any format, complete or not."""
    return any(file.name.removesuffix(".index.json").endswith(WEIGHTS) for file in path.iterdir())


def read_headers(files: Iterable[Path]) -> tuple[dict[Path, Header], dict[str, TensorInfo]]:
    """Read the headers of safetensors files; returns them by file, and the tensors of all by name.

    Raises:
        InvalidInputError: a file is no safetensors file or truncated, or two hold a tensor of the same name.
    """
    headers = {file: read_header(file) for file in files}
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, info in header.tensors.items():
            if name in tensors:
                raise InvalidInputError(
                    f"Tensor {name} is in {tensors[name].file.name} and in {info.file.name}: which one counts? "
                    "Download or write the checkpoint again."
                )
            tensors[name] = info
    return headers, tensors


def read_weight_files(path: Path) -> tuple[dict[Path, Header], dict[str, TensorInfo]]:
    """Find a directory's weight files and `read_headers` of them.

    Raises:
        InvalidInputError: the weights are not safetensors, a file is missing, truncated or contradicts another, or no
            tensors are there.
    """
    files, weight_map = _located(path)
    headers, tensors = read_headers(files)
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise InvalidInputError(
                f"{INDEX} says that tensor {name} is in {file.name}, but it is not. Download {path} again."
            )
    if not tensors:
        raise InvalidInputError(f"The weight files of {path} hold no tensors.")
    return headers, tensors


def _located(path: Path) -> tuple[tuple[Path, ...], dict[str, Path]]:
    """The weight files, and by tensor name the file in which the index looks for it (empty without an index)."""
    # transformers prefers the single file to the index; reading what it would read is the point.
    if (path / SINGLE).exists():
        return (path / SINGLE,), {}
    if not (path / INDEX).exists():
        raise InvalidInputError(without_weights(path))
    _, index = read_object(path / INDEX, lambda: f"{path / INDEX} is missing.")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(f"{path / INDEX} has no weight_map. Download or write it again.")
    if not isinstance(index.get("metadata", {}), dict):  # transformers writes into it
        raise InvalidInputError(f"{path / INDEX}: metadata must be an object. Download or write it again.")
    located: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or not _stays_inside(shard):
            raise InvalidInputError(
                f"{path / INDEX} maps tensor {name} to {shard!r}, which is no safetensors file here."
            )
        located[name] = path / shard
    files = tuple(sorted(set(located.values())))
    if absent := [file.name for file in files if not file.exists()]:
        raise InvalidInputError(
            f"{INDEX} of {path} lists {len(files)} shards; {len(absent)} missing: {', '.join(absent[:5])}. "
            "Download them, or finish the run that was writing them."
        )
    return files, located


def _stays_inside(shard: str) -> bool:
    name = Path(shard)
    return not name.is_absolute() and ".." not in name.parts and "\0" not in shard and len(name.name) <= _LONGEST_NAME
