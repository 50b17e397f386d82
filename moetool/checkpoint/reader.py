"""A checkpoint on disk: its config, the headers of its weight files, and tensors on demand."""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moetool.architectures import aliases, beginnings
from moetool.architectures.base import Settings
from moetool.checkpoint.gguf import gguf_in
from moetool.checkpoint.gguf_parts import parts_of
from moetool.checkpoint.header import TensorInfo, check_dtype, read_numbers
from moetool.checkpoint.json_files import read_object
from moetool.checkpoint.missing import with_adapter, without_config
from moetool.checkpoint.mlx import as_on_the_hub
from moetool.checkpoint.names import ADAPTER, CONFIG, sidecars_in
from moetool.checkpoint.sampling import sampled, whole_limit
from moetool.checkpoint.settings import settings_of
from moetool.checkpoint.sizes import as_read_from
from moetool.checkpoint.source import local_path, resolve_source
from moetool.checkpoint.stored.formats import ABOUT_WEIGHTS, entry_of, matrices_of
from moetool.checkpoint.stored.matrix import DecodedMatrix, GroupScales
from moetool.checkpoint.weight_files import read_headers, read_weight_files
from moetool.errors import InvalidInputError, did_you_mean
from moetool.format.entry import is_quantized_elsewhere, with_usual_entry
from moetool.format.marker import OWN, moetool_entry, without_stored
from moetool.format.mlx import MLX
from moetool.format.validation import check_config, check_headers, check_settings, is_known


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint, read lazily: opening it reads `config.json` and headers, never weights.

    Attributes:
        source: what the user called it: a directory or a hub id.
        path: its local directory.
        config: `config.json` as it stands there, without the library's defaults, and without a format that is decoded.
        tensors: every tensor of the weight files, sorted by name: the hub's, where the files have an alias for it.
        weight_files: the safetensors files, sorted by name.
        weight_bytes: bytes of those files together, headers included.
        times: when each of them was written last, in nanoseconds, as it was opened.
        forms: of those `tensors` that are not in the files, but decoded from others there, by name.
        stored: every tensor of the files where some are decoded; else there is nothing.
        stored_as: the format of another tool in which most are stored, for people ("FP8"); `None` for an ordinary
            checkpoint.
        stored_entry: what that tool says of it, its `quantization_config`.
    """

    source: str
    path: Path
    config: dict[str, object]
    tensors: dict[str, TensorInfo]
    weight_files: tuple[Path, ...]
    weight_bytes: int
    _headers: str = field(repr=False)  # a digest of config, names, sizes and headers
    times: tuple[int, ...] = field(repr=False)
    forms: Mapping[str, DecodedMatrix] = field(default_factory=dict, repr=False)
    stored: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)
    stored_as: str | None = None
    stored_entry: Mapping[str, object] | None = field(default=None, repr=False)

    @classmethod
    def unfinished(cls, path: Path, config: dict[str, object], files: Sequence[Path]) -> "Checkpoint":
        """One that is still being written: its weight files are there, its config and index are not.

        Raises:
            InvalidInputError: a file cannot be read.
        """
        headers, tensors = read_headers(files)
        nbytes = sum(header.file_bytes for header in headers.values())
        ordered = dict(sorted(tensors.items()))
        made = cls(str(path), path, config, ordered, tuple(files), nbytes, "unfinished", ())
        return made if moetool_entry(config) is None else made._decoding()

    @classmethod
    def open(cls, source: str | Path) -> "Checkpoint":
        """Open a local directory or a hub id (downloaded to the hub's cache first). One that another tool has quantized
        shows the matrices that its files stand for, if `checkpoint.stored` knows the format.

        Raises:
            InvalidInputError: there is no such checkpoint, a file is missing, truncated or contradicts another, or
                the weights are not safetensors, or are codes of a quantization that nothing names.
            ResourceError: no disk left for the download.
        """
        path = resolve_source(source)
        config_bytes, config = read_config(path)
        headers, tensors = read_weight_files(path)
        if (path / ADAPTER).exists():
            raise InvalidInputError(with_adapter(path))
        is_marked = any(header.format == MLX for header in headers.values())
        tensors, config = as_on_the_hub(tensors, config, path, is_marked=is_marked)
        ordered = dict(sorted(_hub_names(tensors, config).items()))
        weight_bytes = sum(header.file_bytes for header in headers.values())
        parts = [config_bytes]
        for file, header in headers.items():
            parts += (file.name.encode(), str(header.file_bytes).encode(), header.raw)
        files, times = tuple(headers), tuple(header.written for header in headers.values())
        opened = cls(str(source), path, config, ordered, files, weight_bytes, digest_of(parts), times)._decoding()
        if is_known(config):
            check_headers(opened.settings, config, opened.shapes, path)
        if not is_quantized_elsewhere(opened.config):
            for name, info in opened.tensors.items():
                if name.endswith(".weight") and OWN not in name:
                    check_dtype(name, info.dtype, path)
        return opened

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the headers list, by tensor name."""
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def gguf_file(self) -> Path | None:
        """The GGUF file that it was read from, of several parts the first; `None` of any other checkpoint."""
        return gguf_in(local_path(self.source))

    @property
    def gguf_bytes(self) -> int | None:
        """Bytes of that file, or of all its parts. Raises `InvalidInputError` if a part is gone."""
        return None if (file := self.gguf_file) is None else sum(part.stat().st_size for part in parts_of(file))

    @property
    def given_bytes(self) -> int:
        """Bytes of the GGUF file that it was read from; of any other checkpoint `weight_bytes`."""
        return self.weight_bytes if self.gguf_bytes is None else self.gguf_bytes

    @property
    def in_format(self) -> str:
        """What is said behind its size: " in FP8" where another tool has quantized it, " as read from …" where it is a
        GGUF file, else nothing."""
        return as_read_from(self.gguf_bytes) or ("" if self.stored_as is None else f" in {self.stored_as}")

    @cached_property
    def settings(self) -> Settings:
        """Values of `config.json`, with transformers' defaults for those that it does not set.

        Raises:
            InvalidInputError: transformers does not know the model, or refuses an entry.
        """
        return settings_of(self.config, self.path)

    def _decoding(self) -> "Checkpoint":
        """A view that shows the matrices that tensors in another tool's format stand for, if there are some."""
        if (found := matrices_of(self.config, self.tensors, self.path)) is None:
            return self
        shown = self.showing(found.matrices, without_stored(self.config), found.unused)
        return replace(shown, stored_as=found.description, stored_entry=entry_of(self.config, self.path))

    def showing(
        self, matrices: Iterable[DecodedMatrix], config: Mapping[str, object], unused: Iterable[str] = ()
    ) -> "Checkpoint":
        """A view of the checkpoint that shows decoded matrices in the place of the tensors they are decoded from.

        Args:
            matrices: what it shows.
            config: without what it said of them.
            unused: more names that it does not show any more.
        """
        forms = {matrix.name: matrix for matrix in matrices}
        spent = {part for matrix in forms.values() for part in matrix.parts} | set(unused)
        tensors = {name: info for name, info in self.tensors.items() if name not in spent}
        for name, form in forms.items():
            nbytes = math.prod(form.shape) * form.dtype.itemsize
            at = self.tensors[form.parts[0]]
            tensors[name] = replace(at, name=name, dtype=form.dtype, shape=form.shape, nbytes=nbytes)
        return replace(
            self,
            config=dict(config),
            tensors=dict(sorted(tensors.items())),
            forms={**self.forms, **forms},
            stored=self.on_disk,
        )

    @property
    def on_disk(self) -> Mapping[str, TensorInfo]:
        """Header entries of every tensor as it lies in the files, in whatever format, by name."""
        return self.stored if self.forms else self.tensors

    def stored_parts(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Tensors of the files that decoded matrices of these names are stored in, with all that decoding them takes,
        by name."""
        forms = [self.forms[name] for name in names]
        return {part: self.stored[part] for form in forms for part in (*form.parts, *form.notes)}

    @cached_property
    def unread(self) -> frozenset[str]:
        """Names of the tensors that only another tool's engine reads, such as scales of activations."""
        parts = {part for form in self.forms.values() for part in (*form.parts, *form.notes)}
        return frozenset(self.on_disk.keys() - self.tensors.keys() - parts)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype in which most bytes of the tensors are stored."""
        sizes: dict[torch.dtype, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])

    def growth(self, without: Collection[str] = ()) -> int:
        """Bytes by which decoded matrices grow when they are written as they are read, of all but those of these
        names."""
        names = [name for name in self.forms if name not in without]
        decoded = sum(self.tensors[name].nbytes for name in names)
        return decoded - sum(info.nbytes for info in self.stored_parts(names).values())

    @property
    def shown_bytes(self) -> int:
        """Bytes of the tensors as they are read: more than those of the files where these hold them in fewer bits."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def is_imagined(self) -> bool:
        """Whether there is a config without any weight files, as for plans of models that are not here."""
        return not self.weight_files

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies; `InvalidInputError` with the nearest name if there is none of that name."""
        if name in self.tensors:
            return self.tensors[name]
        raise InvalidInputError(f"{self.path} has no tensor {name}.{did_you_mean(name, self.tensors)}")

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in the dtype it is stored in.

        Raises:
            InvalidInputError: no such tensor, or the file has changed since it was opened.
        """
        info = self.info(name)
        return self._span(info, 0, info.shape)

    def read_stored(self, name: str) -> Tensor:
        """One whole tensor as it is in the files, decoded or not. Raises as `read`."""
        return read_numbers(self.on_disk[name], 0, self.on_disk[name].shape)

    def scales_of(self, name: str) -> GroupScales | None:
        """The scales that the files have for groups of a matrix's inputs; `None` of what is not decoded, or has none.
        Raises as `read`."""
        form = self.forms.get(name)
        return None if form is None else form.scales(self._stored_span)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (excluded) of a tensor: `[stop - start, *shape[1:]]`.

        Raises:
            IndexError: those rows do not exist.
            InvalidInputError: no such tensor, or the file has changed since it was opened.
        """
        info = self.info(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise IndexError(f"Rows {start}:{stop} of tensor {name} with shape {list(info.shape)}")
        return self._span(info, start * math.prod(info.shape[1:]), (stop - start, *info.shape[1:]))

    def blocks(self, name: str, elements: int = 4 << 20) -> Iterator[Tensor]:
        """A tensor as consecutive flat blocks of at most so many elements: for copying what need not fit in memory.

        Raises:
            InvalidInputError: no such tensor, or the file has changed since it was opened.
        """
        info = self.info(name)
        total = math.prod(info.shape)
        for start in range(0, total, elements):
            yield self._span(info, start, (min(elements, total - start),))

    def read_part(self, name: str, index: int, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (excluded) of `tensor[index]`, for a tensor of three dimensions.

        Raises:
            IndexError: they do not exist.
            InvalidInputError: no such tensor, or the file has changed since it was opened.
        """
        info = self.info(name)
        if len(info.shape) != 3 or not (0 <= index < info.shape[0] and 0 <= start <= stop <= info.shape[1]):
            raise IndexError(f"Part {index}, rows {start}:{stop} of tensor {name} with shape {list(info.shape)}")
        return self._span(info, (index * info.shape[1] + start) * info.shape[2], (stop - start, info.shape[2]))

    def _stored_span(self, name: str, first: int, shape: tuple[int, ...]) -> Tensor:
        return read_numbers(self.stored[name], first, shape)

    def _span(self, info: TensorInfo, first: int, shape: tuple[int, ...]) -> Tensor:
        if (form := self.forms.get(info.name)) is None:
            return read_numbers(info, first, shape)
        count, columns = math.prod(shape), info.shape[-1]
        start, stop = first // columns, -(-(first + count) // columns)
        rows = form.rows(self._stored_span, start, stop)
        skipped = first - start * columns
        return rows.view(-1)[skipped : skipped + count].view(shape)

    def sidecars(self) -> list[Path]:
        """Every file that goes into an output byte for byte, sorted: tokenizer, templates, licence, and the like.

        Left out are weights in any format with their indices, `config.json`, which gets patched, `moetool.json`, what
        the job cost and the model card, which describe this checkpoint and no other, the directories of tools
        (`.git`, `.cache`, `.moetool`), and what another tool says of a format that is decoded.
        """
        left = ABOUT_WEIGHTS if self.stored_as is not None else frozenset()
        return sorted(file for file in sidecars_in(self.path) if file.name not in left)

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal, over the config and the names, sizes, headers and content of the weight files.

        Small tensors count whole, of large ones some blocks of each matrix (`moetool.checkpoint.sampling`), so it takes
        seconds at any size. It is independent of where and when the files were written, is computed when it is asked
        for first, and sees every change to all of a tensor. It does not see every damaged byte.

        Raises:
            InvalidInputError: a file cannot be read any more.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        if self.is_imagined:
            return self._headers
        return digest_of([self._headers.encode(), sampled(self.on_disk.values())])

    @property
    def is_fingerprinted_whole(self) -> bool:
        """Whether the fingerprint is computed over every byte of the weights, and not over samples of large tensors."""
        sizes = [info.nbytes for info in self.on_disk.values()]
        return max(sizes, default=0) <= whole_limit(self.on_disk.values())


def read_config(path: Path) -> tuple[bytes, dict[str, object]]:
    """`config.json` of a checkpoint's directory, as bytes and parsed, checked; what another tool says of its format is
    moved to where it is usual. Raises `InvalidInputError`."""
    content, found = read_object(path / CONFIG, lambda: without_config(path))
    config = with_usual_entry(found)
    check_config(config, path / CONFIG)
    if is_known(config):
        check_settings(settings_of(config, path), config, path / CONFIG)
    return content, config


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 in hexadecimal over parts, no two sequences of which hash alike."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _hub_names(tensors: dict[str, TensorInfo], config: dict[str, object]) -> dict[str, TensorInfo]:
    """Give tensors the names that the family's checkpoints have on the hub, or as transformers saves them."""
    named: dict[str, TensorInfo] = {}
    starts, parts = beginnings(config), aliases(config)
    for info in tensors.values():
        name = info.name
        if (start := next(filter(name.startswith, starts), None)) is not None:
            name = starts[start] + name.removeprefix(start)
        for alias, own in parts.items():
            name = name.replace(alias, own)
        if name in named:
            raise InvalidInputError(
                f"{info.name} and {named[name].name} of {info.file.parent} are two names of one tensor, {name}: which "
                "one counts? Download or write the checkpoint again."
            )
        named[name] = info
    return {name: replace(info, name=name) for name, info in named.items()}
