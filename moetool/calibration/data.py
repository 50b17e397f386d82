"""Text to windows of tokens, for calibration and for evaluation.

A source of text is one stream. A `.txt` file is that stream as it stands; the documents of record files (`.jsonl`,
`.parquet`, the hub), and the files of a folder, are joined by an empty line, as is the custom for WikiText.
"""

import contextlib
import glob
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.calibration.opening import Bos, opening_of
from moetool.checkpoint.source import first_line, local_path, looks_local
from moetool.errors import InvalidInputError, UsageError, did_you_mean

if TYPE_CHECKING:  # transformers takes seconds to import, and not only for --help
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".txt", ".jsonl", ".parquet")
_BUILDERS = {".jsonl": "json", ".parquet": "parquet"}  # of `datasets`
SEPARATOR = "\n\n"
READ_CHARS = 1 << 20
# Fast tokenizers take up to 450 bytes per token while they work, so this much text needs about 1.3 GB.
WHOLE_TEXT_CHARS = 8 << 20
SAMPLING_CHARS = 1 << 20
# Windows are drawn from at least this many tokens, and from this many times what is asked for.
RESERVOIR_TOKENS = 1 << 20
RESERVOIR_FACTOR = 16


@dataclass(frozen=True)
class DataSpec:
    """One source of text.

    Attributes:
        source: a `.txt`, `.jsonl` or `.parquet` file, a folder of those, or the id of a hub data set.
        config: configuration of a hub data set, `None` for its only or default one.
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
            UsageError: it is empty, has too many parts, a weight that is not positive, or a `config` or `split` for
                something local.
            InvalidInputError: no file system takes such a name.
        """
        name, weight = text.strip(), 1.0
        head, at, tail = name.rpartition("@")
        if at and not _exists(name):
            with contextlib.suppress(ValueError):  # the @ belongs to the name
                name, weight = head, float(tail)
        if not 0 < weight < math.inf:
            raise UsageError(f"The weight of {head!r} is {tail}; give a positive number after the @.")
        pieces = name.split(":")
        # The longest beginning that exists is the path.
        lengths = (n for n in range(len(pieces), 0, -1) if _exists(":".join(pieces[:n])))
        length = next(lengths, 1)
        source, parts = ":".join(pieces[:length]), [piece or None for piece in pieces[length:]]
        _check_name(source)
        if not source or len(parts) > 3:
            raise UsageError(f"Cannot read the data {text!r}: expected PATH or NAME[:config[:split[:column]]].")
        config, split, column = (*parts, None, None, None)[:3]
        if (config or split) and _exists(source):
            raise UsageError(f"{source} is local, so it has no config or split; for a column write {source}:::COLUMN.")
        return cls(source, config, split, column, weight)


def parse_data(data: str) -> tuple[DataSpec, ...]:
    """Every source of a DATA argument: one, or several separated by commas; see `DataSpec.parse`.

    Raises:
        UsageError: one of them cannot be parsed.
    """
    if _exists(data.strip()):
        return (DataSpec(data.strip()),)
    return tuple(DataSpec.parse(part) for part in data.split(","))


def iter_text(spec: DataSpec) -> Iterator[str]:
    """The text of one source in pieces; joined with nothing between them they are the stream.

    Raises:
        InvalidInputError: the source is missing, unreadable or of an unknown kind, or lacks the column.
    """
    path = local_path(spec.source)
    if path.is_dir():
        files = data_files(path)
        if not files:
            raise InvalidInputError(f"The folder {path} has no {', '.join(SUFFIXES)} files.")
        yield from _separated(_file_text(file, spec.column) for file in files)
    elif path.exists():
        yield from _file_text(path, spec.column)
    elif looks_local(spec.source) or path.suffix in SUFFIXES:
        raise InvalidInputError(f"No such file or folder: {spec.source}.")
    else:
        yield from _separated([text] for text in _hub_documents(spec))


def token_stream(
    tokenizer: "PreTrainedTokenizerBase", text: Iterable[str], chunk_chars: int = WHOLE_TEXT_CHARS
) -> Iterator[list[int]]:
    """The tokens of a text, without special tokens, in chunks.

    Up to `chunk_chars` characters are tokenised whole. Longer text is cut, where possible after a line break between
    two characters that are not blank: there the tokenizers that split text into words first give the tokens that they
    would give for the whole; those that do not (Llama 2) may differ in the tokens next to a cut.

    Args:
        tokenizer: a transformers tokenizer.
        text: pieces of the text, which are joined before they are cut anew.
        chunk_chars: characters to tokenise at once; bounds the memory.
    """
    for chunk in _chunks(text, chunk_chars):
        # `verbose` off: the stream is longer than the model's context, and that is no reason to warn.
        ids = tokenizer(chunk, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
        yield list(ids)


def sample_windows(
    data: str, tokenizer: "PreTrainedTokenizerBase", *, samples: int, sequence_length: int, seed: int, bos: Bos = "auto"
) -> Tensor:
    """Windows drawn at random from one or several sources: int64 `[samples, sequence_length]`.

    Every source's stream is trimmed by a random phase and cut into consecutive windows, from which as many as are due
    to its weight are drawn without replacement: they never overlap. Of a long stream only the beginning is read:
    16 times as many windows as are due, and at least a million tokens. A source with too few windows gives all of
    them, so that fewer than `samples` may come back; the caller sees it from the shape.

    Args:
        data: one source, or several with their weights.
        tokenizer: a transformers tokenizer.
        samples: windows.
        sequence_length: tokens in a window, those that it begins with among them.
        seed: of the drawing.
        bos: what a window begins with, see `opening_of`.

    Raises:
        UsageError: numbers out of range, or DATA that cannot be parsed.
        InvalidInputError: a source cannot be read, or is shorter than one window.
    """
    if samples < 1:
        raise UsageError(f"{samples} samples: give at least 1.")
    opening = opening_of(tokenizer, bos)
    _check_length(sequence_length, opening)
    sequence_length -= len(opening)
    specs = parse_data(data)
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for spec, due in zip(specs, _shares(samples, [spec.weight for spec in specs]), strict=True):
        if due == 0:
            continue
        limit = max(RESERVOIR_FACTOR * due * sequence_length, RESERVOIR_TOKENS)
        tokens = _read_tokens(spec, tokenizer, sequence_length, limit, SAMPLING_CHARS, len(opening))
        count = len(tokens) // sequence_length
        # With windows to spare the phase may cost one; without, it only moves what the last one leaves over.
        room = sequence_length if count > due else len(tokens) - count * sequence_length + 1
        phase = int(torch.randint(room, (), generator=generator))
        windows = _cut(tokens[phase:], sequence_length)
        drawn.append(windows[torch.randperm(len(windows), generator=generator)[:due]])
    return _opened(torch.cat(drawn), opening)


def evaluation_windows(
    data: str | DataSpec,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    sequence_length: int,
    limit: int | None = None,
    bos: Bos = "auto",
) -> Tensor:
    """Consecutive windows over all of the text, the rest dropped: int64 `[windows, sequence_length]`.

    Args:
        data: one source, or several: then the windows of one follow those of another, and none spans two.
        tokenizer: a transformers tokenizer.
        sequence_length: tokens in a window, those that it begins with among them.
        limit: the most windows to return; no more is read than they take.
        bos: what a window begins with, see `opening_of`.

    Raises:
        UsageError: numbers out of range, DATA that cannot be parsed, or weights, which mean nothing here.
        InvalidInputError: a source cannot be read, or is shorter than one window.
    """
    opening = opening_of(tokenizer, bos)
    _check_length(sequence_length, opening)
    sequence_length -= len(opening)
    if limit is not None and limit < 1:
        raise UsageError(f"A limit of {limit} windows: give at least 1.")
    specs = (data,) if isinstance(data, DataSpec) else parse_data(data)
    if any(spec.weight != 1 for spec in specs):
        raise UsageError("Evaluation takes every window of the data: leave out the @weights.")
    found: list[Tensor] = []
    for spec in specs:
        left = None if limit is None else limit - sum(map(len, found))
        if left == 0:
            break
        most = None if left is None else left * sequence_length
        tokens = _read_tokens(spec, tokenizer, sequence_length, most, WHOLE_TEXT_CHARS, len(opening))
        found.append(_cut(tokens, sequence_length))
    return _opened(torch.cat(found), opening)


def check_vocabulary(windows: Tensor, vocab_size: int | None) -> None:
    """Raise `InvalidInputError` if a token is none of the model's `vocab_size`: the tokenizer is another model's. Not
    if that is not known (`None`)."""
    if vocab_size is not None and windows.numel() and not 0 <= (highest := int(windows.max())) < vocab_size:
        raise InvalidInputError(
            f"The text has token {highest}, but the model's vocabulary ends at {vocab_size - 1}: "
            "the tokenizer does not belong to this model."
        )


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint; a local directory is all that is looked at, if there is one.

    Raises:
        InvalidInputError: there is none, or it cannot be loaded without running code of the checkpoint.
    """
    from transformers import AutoTokenizer

    directory = local_path(path)
    local = directory.is_dir()
    name = str(directory) if local else str(path)
    if not local and (isinstance(path, Path) or looks_local(name)):
        raise InvalidInputError(f"No such directory: {path}.")
    if local and not any(_is_vocabulary(file.name) for file in directory.iterdir()):
        raise InvalidInputError(f"No tokenizer in {path}: copy tokenizer.json and tokenizer_config.json there.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        tokenizer("some text", add_special_tokens=False, verbose=False)  # some nonsense in files only shows here
        return tokenizer
    except Exception as error:  # each tokenizer class fails in its own way on files that it cannot use
        raise InvalidInputError(f"Cannot load the tokenizer of {path}: {first_line(error)}.") from error


def _is_vocabulary(name: str) -> bool:
    stems = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "tekken", "tiktoken")
    return name.startswith(stems) or name.endswith((".model", ".tiktoken"))


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        return False


def _check_name(name: str) -> None:
    try:
        Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        shown = name if len(name) <= 80 else f"{name[:76]} …"
        raise InvalidInputError(f"Cannot read the data {shown!r}: {reason}.") from error


def data_files(path: Path) -> list[Path]:
    """A file, or those of a folder that hold text or records, in order, without hidden ones.

    Raises:
        InvalidInputError: a folder cannot be read.
    """
    if not path.is_dir():
        return [path]

    def refuse(error: OSError) -> None:
        raise InvalidInputError(f"Cannot read the folder {error.filename}: {error.strerror}.") from error

    found: list[Path] = []
    for directory, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(directory, name) for name in names if not name.startswith("."))
        found += [file for file in files if file.suffix in SUFFIXES and file.is_file()]
    return sorted(found)


def _separated(texts: Iterable[Iterable[str]]) -> Iterator[str]:
    for i, text in enumerate(texts):
        if i:
            yield SEPARATOR
        yield from text


def _file_text(file: Path, column: str | None) -> Iterator[str]:
    if file.suffix not in SUFFIXES:
        raise InvalidInputError(f"Cannot tell what {file} is: its name should end in {', '.join(SUFFIXES)}.")
    if file.suffix != ".txt":
        yield from _separated([text] for text in _record_documents(file, column))
        return
    try:
        with file.open(encoding="utf-8") as handle:
            while block := handle.read(READ_CHARS):
                yield block
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{file} is not UTF-8 ({error}). Convert it, for example with iconv.") from error
    except OSError as error:
        raise InvalidInputError(f"Cannot read {file}: {error.strerror or error}.") from error


def _record_documents(file: Path, column: str | None) -> Iterator[str]:
    yield from _documents(records(DataSpec(str(file))), str(file), column)


def records(spec: DataSpec) -> Iterator[Mapping[str, Any]]:
    """The records of one source: a `.jsonl` or `.parquet` file, a folder of them, or a hub data set.

    Raises:
        InvalidInputError: the source is missing, unreadable or of an unknown kind.
    """
    path = local_path(spec.source)
    if path.exists():
        files = [file for file in data_files(path) if path.is_file() or file.suffix in _BUILDERS]
        if not files or any(file.suffix not in _BUILDERS for file in files):
            raise InvalidInputError(
                f"{path} holds no records: give a {' or '.join(_BUILDERS)} file, or a folder of them."
            )
        for file in files:
            if file.stat().st_size:  # `datasets` answers nothing with a StopIteration
                # `datasets` takes names for patterns.
                arguments = {"data_files": [glob.escape(str(file.absolute()))], "split": "train"}
                yield from _rows(str(file), {"path": _BUILDERS[file.suffix], **arguments})
    elif looks_local(spec.source) or path.suffix in SUFFIXES:
        raise InvalidInputError(f"No such file or folder: {spec.source}.")
    else:
        yield from _rows(spec.source, {"path": spec.source, "name": spec.config, "split": spec.split or "train"})


def _hub_documents(spec: DataSpec) -> Iterator[str]:
    arguments = {"path": spec.source, "name": spec.config, "split": spec.split or "train"}
    yield from _documents(_rows(spec.source, arguments), spec.source, spec.column)


def _rows(source: str, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The records of a streamed data set."""
    import datasets

    try:
        yield from datasets.load_dataset(**arguments, streaming=True)
    except Exception as error:  # a builder, a file system and a decoder, each with errors of its own
        raise InvalidInputError(
            f"Cannot read the data {source!r}: {first_line(error)}. "
            "Check the name, its config and split, and the connection, or give a local file."
        ) from error


def _documents(rows: Iterable[Mapping[str, Any]], source: str, column: str | None) -> Iterator[str]:
    """The text of every record that has one."""
    for number, row in enumerate(rows, start=1):
        columns = (column,) if column else _text_columns(row)
        if not columns or any(name not in row for name in columns):
            wanted = f"no column {column!r}" if column else "none of text, content, prompt and completion, messages"
            there = ", ".join(map(repr, row)) or "no columns"
            hint = did_you_mean(column, row) if column else ""
            raise InvalidInputError(f"{source} has {wanted}; it has {there}. Name one: {source}:::COLUMN.{hint}")
        texts = [_as_text(row[name], f"{source}, record {number}, {name!r}") for name in columns]
        if any(text is not None for text in texts):
            yield "".join(text or "" for text in texts)


def _text_columns(row: Mapping[str, Any]) -> Sequence[str]:
    candidates = [("text",), ("content",), ("prompt", "completion"), ("messages",)]
    there = [names for names in candidates if all(name in row for name in names)]
    # In a file of mixed records each has every column, with nothing in those that are not its own.
    filled = [names for names in there if any(row[name] is not None for name in names)]
    return next(iter(filled or there), ())


def _as_text(value: Any, where: str) -> str | None:
    """A string as it is, messages one per line, nothing as `None`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value.keys() & {"content", "text", "role", "type"}:
        return _as_text(value.get("content", value.get("text")), where)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "\n".join(text for part in value if (text := _as_text(part, where)) is not None)
    raise InvalidInputError(f"{where} holds {json.dumps(value, default=str)[:80]}, not text. Name another column.")


def _chunks(text: Iterable[str], chunk_chars: int) -> Iterator[str]:
    pending: list[str] = []
    size = 0
    for piece in text:
        pending.append(piece)
        size += len(piece)
        if size > chunk_chars:
            rest = "".join(pending)
            while len(rest) > chunk_chars:
                cut = _cut_point(rest, chunk_chars)
                yield rest[:cut]
                rest = rest[cut:]
            pending, size = [rest], len(rest)
    if size:
        yield "".join(pending)


def _cut_point(text: str, most: int) -> int:
    """Where to cut: after a lone line break, after any, before a space, or anywhere, as far along as possible."""
    end = most
    while (found := text.rfind("\n", 1, end)) > 0:
        if not text[found - 1].isspace() and not text[found + 1].isspace():
            return found + 1
        end = found
    if (found := text.rfind("\n", 0, most)) >= 0:
        return found + 1
    return found if (found := text.rfind(" ", 1, most)) > 0 else most


def _read_tokens(
    spec: DataSpec,
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    most: int | None,
    chunk_chars: int,
    opening: int,
) -> Tensor:
    """The first `most` tokens of a source, int64 `[tokens]`, at least `sequence_length`, which with as many as a window
    begins with make one."""
    parts: list[Tensor] = []
    count = 0
    for ids in token_stream(tokenizer, iter_text(spec), chunk_chars):
        parts.append(torch.tensor(ids, dtype=torch.int64))
        count += len(ids)
        if most is not None and count >= most:
            break
    if count == 0:
        raise InvalidInputError(f"{spec.source} has no text.")
    if count < sequence_length:
        raise InvalidInputError(
            f"{spec.source} has {count} tokens; one window needs {sequence_length}. "
            f"Give more text, or --sequence-length {count + opening} or less."
        )
    return torch.cat(parts)[:most]


def _cut(tokens: Tensor, sequence_length: int) -> Tensor:
    count = len(tokens) // sequence_length
    return tokens[: count * sequence_length].view(count, sequence_length)


def _opened(windows: Tensor, opening: Sequence[int]) -> Tensor:
    """The same windows `[windows, length]`, each after `opening`."""
    return torch.cat([torch.tensor(opening, dtype=torch.int64).expand(len(windows), -1), windows], dim=1)


def _check_length(sequence_length: int, opening: Sequence[int]) -> None:
    least = max(2, len(opening) + 1)
    if sequence_length < least:
        raise UsageError(
            f"A sequence length of {sequence_length}: give at least {least}, one token to predict another."
        )


def _shares(samples: int, weights: Sequence[float]) -> list[int]:
    """`samples` divided in proportion to `weights`, by largest remainder; the first of equals wins."""
    quotas = [samples * weight / math.fsum(weights) for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda i: shares[i] - quotas[i])
    for i in order[: samples - sum(shares)]:
        shares[i] += 1
    return shares
