"""Parses the DATA arguments of commands and reads the texts that they name.

A source of text is one stream. A `.txt` file is that stream as it stands; the documents of record files (`.jsonl`,
`.parquet`, the hub), and the files of a folder, are joined by an empty line, as is the custom for WikiText.
"""

import contextlib
import glob
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetool.calibration.bundled import kinds, texts
from moetool.calibration.json_records import json_records
from moetool.checkpoint.header import reading
from moetool.checkpoint.source import check_repository, first_line, is_here, local_path, looks_local
from moetool.errors import InvalidInputError, UsageError, did_you_mean

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
RECORD_SUFFIXES = (".jsonl", ".parquet")
_PACKED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip"})
TEXT_COLUMNS = ("text", "content")  # that hold a whole text, the first that is there
BUNDLED = "bundled"  # the text that comes with moetool, where nothing of that name is on the disk
SELF = "self"  # text that the model itself writes, likewise
OWN_TEXT = "the model's own text"
TEMPERATURES = (0.7, 1.0)  # of that text, where none is given: windows take turns
_HOTTEST = 2.0
SEPARATOR = "\n\n"
READ_CHARS = 1 << 20
_LOGGER = logging.getLogger(__name__)
_NO_TEXT = ("int", "uint", "float", "double", "half", "bool", "binary", "large_binary")  # types of parquet
_LOOKED_AT, _LARGE = 20, 1 << 26  # files of a folder, and bytes of one, that are looked at beforehand
_ENDINGS = 5  # of files that are skipped, which are named


@dataclass(frozen=True)
class DataSpec:
    """One source of text, as a part of a DATA argument names it.

    Attributes:
        source: a `.txt`, `.jsonl` or `.parquet` file, a folder of those, or the id of a hub data set.
        config: configuration of a hub data set, `None` for its only or default one; a kind of the bundled text, `None`
            for all; the temperature of the model's own text, `None` for `TEMPERATURES`.
        split: split of a hub data set, `None` for `train`.
        column: field that holds the text, `None` to take `text`, `content`, `prompt` + `completion` or `messages`.
        weight: share of the samples, relative to the other sources.
    """

    source: str
    config: str | None = None
    split: str | None = None
    column: str | None = None
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "DataSpec":
        """Parse `SOURCE[:config[:split[:column]]][@weight]`; a part left empty takes its default.

        What exists on disk is taken as a path, with any `:` and `@` in it.

        Raises:
            UsageError: it is empty, has too many parts, a weight that is no positive number, a `config` or `split` for
                something local, or what the bundled text or the model's own does not have.
            InvalidInputError: no file system takes such a name.
        """
        name, weight = text.strip(), 1.0
        head, at, tail = name.rpartition("@")
        if at and not is_here(name):
            try:
                name, weight = head, float(tail)
            except ValueError:  # the @ belongs to the name
                weight = math.nan if is_here(head) or head.partition(":")[0] == BUNDLED else 1.0
        if not 0 < weight < math.inf:
            raise UsageError(f"The weight of {head!r} is {tail!r}; give a positive number after the @.")
        pieces = name.split(":")
        # The longest beginning that exists is the path.
        lengths = (n for n in range(len(pieces), 0, -1) if is_here(":".join(pieces[:n])))
        length = next(lengths, 1)
        source, parts = ":".join(pieces[:length]), [piece or None for piece in pieces[length:]]
        try:
            local_path(source or ".")
        except InvalidInputError as error:
            raise InvalidInputError(f"Cannot read the data: {error}") from error
        if not source or len(parts) > 3:
            raise UsageError(f"Cannot read the data {text!r}: expected PATH or NAME[:config[:split[:column]]].")
        config, split, column = (*parts, None, None, None)[:3]
        if (config or split) and is_here(source):
            raise UsageError(f"{source} is local, so it has no config or split; for a column write {source}:::COLUMN.")
        if source == BUNDLED and (split or column) and not is_here(source):
            raise UsageError(f"The bundled text has kinds, and neither splits nor columns: {BUNDLED}[:KIND].")
        spec = cls(source, config, split, column, weight)
        if spec.is_self:
            spec._check_self()
        return spec

    @property
    def is_bundled(self) -> bool:
        """Whether the source is the text that comes with moetool, and not a file or folder of that name."""
        return self.source == BUNDLED and not is_here(BUNDLED)

    @property
    def is_self(self) -> bool:
        """Whether the source is what the model itself writes, and not a file or folder of that name."""
        return self.source == SELF and not is_here(SELF)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Sampling temperatures of the model's own text; windows take them in turn."""
        return TEMPERATURES if self.config is None else (float(self.config),)

    def _check_self(self) -> None:
        """Raise `UsageError` for splits, columns, or a temperature that is none."""
        temperature = math.nan
        with contextlib.suppress(ValueError):
            temperature = 1.0 if self.config is None else float(self.config)
        if self.split or self.column or not 0 < temperature <= _HOTTEST:
            raise UsageError(
                f"The model's own text has a temperature above 0 and up to {_HOTTEST:g}, and nothing else: "
                f"{SELF}[:TEMPERATURE], such as {SELF}:0.8."
            )

    @property
    def name(self) -> str:
        """A short name of the source: that of a file or folder, or the id of a hub data set."""
        if self.is_self:
            return OWN_TEXT
        return local_path(self.source).name if is_here(self.source) else self.source

    @property
    def written(self) -> str:
        """The source in the spelling that `parse_data` reads, `name:config:split:column`, without its weight."""
        return ":".join([self.source, *(part or "" for part in (self.config, self.split, self.column))]).rstrip(":")


def parse_data(data: str) -> tuple[DataSpec, ...]:
    """Every source of a DATA argument: one, or several separated by commas; see `DataSpec.parse`.

    Raises:
        UsageError: one of them cannot be parsed.
    """
    if is_here(data.strip()):
        return (DataSpec(data.strip()),)
    return tuple(DataSpec.parse(part) for part in data.split(","))


def iter_text(spec: DataSpec) -> Iterator[str]:
    """The text of one source in pieces; joined with nothing between them they are the stream.

    Raises:
        UsageError: it is the model's own text, which is not there yet.
        InvalidInputError: the source is missing, unreadable or of an unknown kind, or lacks the column.
    """
    path = local_path(spec.source)
    _refuse_self(spec)
    if spec.is_bundled:
        yield from _separated([text] for kind in kinds(spec.config) for text in texts(kind))
    elif path.is_dir():
        files = _files_of(path, TEXT_SUFFIXES)
        if not files:
            raise InvalidInputError(f"The folder {path} has no {', '.join(TEXT_SUFFIXES)} files.")
        yield from _separated(_file_text(file, spec.column) for file in files)
    elif path.exists():
        yield from _file_text(path, spec.column)
    else:
        yield from _separated([text] for text in _documents(spec))


def check_data(data: str, *, own: bool = False) -> tuple[DataSpec, ...]:
    """Every source of a DATA argument, after a look at its beginning: at names alone of what is on the hub. The model's
    `own` text is for jobs that calibrate.

    Raises:
        UsageError: it cannot be parsed, or is the model's own text where there is none.
        InvalidInputError: a source is missing, unreadable, empty or of an unknown kind, lacks the column, or has a name
            that no data set of the hub can have.
    """
    specs = parse_data(data)
    for spec in specs:
        path = local_path(spec.source)
        if spec.is_self and own:
            continue
        _refuse_self(spec)
        if spec.is_bundled:
            kinds(spec.config)
        elif path.exists():
            if not (files := data_files(path)):
                raise InvalidInputError(f"The folder {path} has no {', '.join(TEXT_SUFFIXES)} files.")
            found = [_check_file(file, spec.column) for file in files[:_LOOKED_AT]]
            if not any(found) and not any(file.stat().st_size for file in files[_LOOKED_AT:]):
                raise InvalidInputError(f"{spec.source} has no text. Blanks and line breaks are none.")
        elif looks_local(spec.source) or path.suffix in TEXT_SUFFIXES:
            raise InvalidInputError(f"No such file or folder: {spec.source}.")
        else:
            check_repository(spec.source)
    return specs


def _check_file(file: Path, column: str | None) -> bool:
    """Whether a file holds text, for parquet any rows. Raises `InvalidInputError` for one without text in the column,
    by its first record or, for parquet, its schema; a `.jsonl` file that is one large array is left to the job."""
    size = file.stat().st_size
    if file.suffix == ".parquet" and size:
        schema = (footer := _parquet(file)).schema.to_arrow_schema()
        for name in _columns(dict.fromkeys(schema.names, ""), str(file), column):
            if (kind := str(schema.field(name).type)).startswith(_NO_TEXT):
                raise InvalidInputError(f"{file}, {name!r} holds {kind}, not text. Name another column.")
        return bool(footer.num_rows)
    with reading(file), file.open("rb") as opened:
        if file.suffix == ".jsonl" and opened.read(1) == b"[" and size > _LARGE:
            return True
    return any(map(str.strip, _file_text(file, column)))


def _parquet(file: Path) -> "FileMetaData":
    """The footer of a parquet file: its schema and the number of its rows. Raises `InvalidInputError`."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInputError(f"Cannot read the data {str(file)!r}: {first_line(error)}. Is it whole?") from error


def data_files(path: Path) -> list[Path]:
    """List a file, or the text and record files of a folder, sorted and without hidden ones.

    Raises:
        InvalidInputError: a folder cannot be read, or it is a pipe or a device.
    """
    if not path.is_dir() and not path.is_file():  # such as <(command): its beginning is looked at before it is read
        raise InvalidInputError(f"{path} is no file but a pipe or a device, read only once: save it as a .txt file.")
    return [file for file in _files(path) if file.suffix in TEXT_SUFFIXES] if path.is_dir() else [path]


def _files(folder: Path) -> list[Path]:
    """All files of a folder and those in it, sorted and without hidden ones."""

    def refuse(error: OSError) -> None:
        raise InvalidInputError(f"Cannot read the folder {error.filename}: {error.strerror}.") from error

    found: list[Path] = []
    for directory, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(directory, name) for name in names if not name.startswith("."))
        found += filter(Path.is_file, files)
    return sorted(found)


def _files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of a folder with these endings; how many have others is said."""
    files = _files(folder)
    if others := [file for file in files if file.suffix not in suffixes]:
        endings = ", ".join(sorted({file.suffix or "no ending" for file in others})[:_ENDINGS])
        _LOGGER.warning(
            f"{folder}: {len(others)} of {len(files)} files are skipped ({endings}); "
            f"those in {', '.join(suffixes)} are read."
        )
    return [file for file in files if file.suffix in suffixes]


def _refuse_self(spec: DataSpec) -> None:
    if spec.is_self:
        raise UsageError(f"Only --calibration takes {SELF!r}, the text that a model writes itself: give another text.")


def _separated(texts: Iterable[Iterable[str]]) -> Iterator[str]:
    for i, text in enumerate(texts):
        if i:
            yield SEPARATOR
        yield from text


def _file_text(file: Path, column: str | None) -> Iterator[str]:
    if file.suffix not in TEXT_SUFFIXES:
        instead = "Unpack it." if file.suffix in _PACKED else f"If it is plain text, give a copy named {file.stem}.txt."
        raise InvalidInputError(
            f"Cannot tell what {file} is: its name should end in {', '.join(TEXT_SUFFIXES)}. {instead}"
        )
    if file.suffix != ".txt":
        yield from _separated([text] for text in _documents(DataSpec(str(file), column=column)))
        return
    with reading(file), file.open(encoding="utf-8-sig") as handle:
        while block := handle.read(READ_CHARS):
            yield block


def records(spec: DataSpec) -> Iterator[Mapping[str, object]]:
    """The records of one source: a `.jsonl` or `.parquet` file, a folder of them, or a hub data set.

    Raises:
        UsageError: it is the model's own text.
        InvalidInputError: the source is missing, unreadable or of an unknown kind.
    """
    _refuse_self(spec)
    path = local_path(spec.source)
    if path.exists():
        files = [path] if path.is_file() else _files_of(path, RECORD_SUFFIXES)
        if not files or any(file.suffix not in RECORD_SUFFIXES for file in files):
            raise InvalidInputError(
                f"{path} holds no records: give a {' or '.join(RECORD_SUFFIXES)} file, or a folder of them."
            )
        for file in files:
            if file.suffix == ".jsonl":
                yield from json_records(file)
            # `datasets` answers nothing with a StopIteration, and a file without rows with an error of pyarrow's.
            elif file.stat().st_size and _parquet(file).num_rows:
                # `datasets` takes names for patterns.
                arguments = {"data_files": [glob.escape(str(file.absolute()))], "split": "train"}
                yield from _rows(str(file), {"path": "parquet", **arguments})
    elif looks_local(spec.source) or path.suffix in TEXT_SUFFIXES:
        raise InvalidInputError(f"No such file or folder: {spec.source}.")
    else:
        yield from _rows(spec.source, {"path": spec.source, "name": spec.config, "split": spec.split or "train"})


def _rows(source: str, arguments: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Iterate over the records of a data set that `datasets` streams."""
    import datasets

    try:
        with _unlogged("datasets.packaged_modules.parquet.parquet"):  # says what it raises, too
            yield from datasets.load_dataset(**arguments, streaming=True)
    except Exception as error:  # a builder, a file system and a decoder, each with errors of its own
        advice = "Check the name, its config and split, and the connection, or give a local file."
        if "data_files" in arguments:
            advice = "Is it whole?"
        raise InvalidInputError(f"Cannot read the data {source!r}: {first_line(error)}. {advice}") from error


@contextlib.contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Drop what a library's logger of this name is told within."""

    def dropped(_: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger(name)
    logger.addFilter(dropped)
    try:
        yield
    finally:
        logger.removeFilter(dropped)


def _documents(spec: DataSpec) -> Iterator[str]:
    """The text of every record that has one; the first must have the column."""
    source, column = spec.source, spec.column
    for number, row in enumerate(records(spec), start=1):
        if not (columns := _columns(row, source, column, must=number == 1)):
            continue
        place = f"{source}, record {number}"
        if column is None and (name := columns[0]) in TEXT_COLUMNS and isinstance(row[name], list):
            said = json.dumps(row[name], default=str)[:80]
            raise InvalidInputError(
                f"{place}: its {name} has to be text, found {said}. {source}:::{name} takes a list, one item a line."
            )
        texts = [_as_text(row[name], f"{place}, {name!r}") for name in columns]
        if any(text is not None for text in texts):
            yield "".join(text or "" for text in texts)


def _columns(row: Mapping[str, object], source: str, column: str | None, *, must: bool = True) -> Sequence[str]:
    """Columns of a record that hold its text; none where there are none, `InvalidInputError` if there `must` be."""
    columns = (column,) if column else _text_columns(row)
    if columns and all(name in row for name in columns):
        return columns
    if not must:
        return ()
    wanted = f"no column {column!r}" if column else "none of text, content, prompt and completion, messages"
    there = ", ".join(map(repr, row)) or "no columns"
    hint = did_you_mean(column, row) if column else ""
    renamed = "Rename fields to prompt and completion, or name one" if len(row) > 1 and not column else "Name one"
    raise InvalidInputError(f"{source} has {wanted}; it has {there}. {renamed}: {source}:::COLUMN.{hint}")


def _text_columns(row: Mapping[str, object]) -> Sequence[str]:
    candidates = [*((name,) for name in TEXT_COLUMNS), ("prompt", "completion"), ("messages",)]
    there = [names for names in candidates if all(name in row for name in names)]
    # In a file of mixed records each has every column, with nothing in those that are not its own.
    filled = [names for names in there if any(row[name] is not None for name in names)]
    return next(iter(filled or there), ())


def _as_text(value: object, where: str) -> str | None:
    """A string as it is, messages one per line, nothing as `None`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value.keys() & {"content", "text", "role", "type"}:
        return _as_text(value.get("content", value.get("text")), where)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "\n".join(text for part in value if (text := _as_text(part, where)) is not None)
    raise InvalidInputError(f"{where} holds {json.dumps(value, default=str)[:80]}, not text. Name another column.")
