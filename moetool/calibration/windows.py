"""Text to windows of tokens, for calibration and for evaluation."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moetool.calibration.data import DataSpec, iter_text, parse_data
from moetool.calibration.mixing import bundled_tokens, filled_shares, interleaved_windows
from moetool.calibration.opening import Bos, Tokenizer, opening_of
from moetool.checkpoint.source import first_line, local_path, looks_local
from moetool.errors import InvalidInputError, UsageError

# Fast tokenizers take up to 450 bytes per token while they work, so this much text needs about 1.3 GB.
WHOLE_TEXT_CHARS = 8 << 20
SAMPLING_CHARS = 1 << 20
# Windows are drawn from at least this many tokens, and from this many times what is asked for.
RESERVOIR_TOKENS = 1 << 20
RESERVOIR_FACTOR = 16


def token_stream(tokenizer: Tokenizer, text: Iterable[str], chunk_chars: int = WHOLE_TEXT_CHARS) -> Iterator[list[int]]:
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


class DrawnWindows(NamedTuple):
    """Windows of a text.

    Attributes:
        windows: int64 `[samples, length]`, or fewer where there are no more.
        others: of what is left, without overlap.
        left_out: `kind/name` of the pieces of the bundled text that the tokenizer cannot read.
    """

    windows: Tensor
    others: Tensor
    left_out: tuple[str, ...]


def sample_windows(
    data: str, tokenizer: Tokenizer, *, samples: int, sequence_length: int, seed: int, bos: Bos = "auto"
) -> Tensor:
    """Windows drawn at random from one or several sources: int64 `[samples, sequence_length]`.

    Every source's stream is trimmed by a random phase and cut into consecutive windows, from which as many as are due
    to its weight are drawn without replacement: they never overlap. Of a long stream only the beginning is read:
    16 times as many windows as are due, and at least a million tokens. A source with too few windows gives all of
    them, so that fewer than `samples` may come back; the caller sees it from the shape. Of the bundled text each kind
    gives as many, without the pieces that the tokenizer cannot read. Windows of several texts take turns.

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
    drawn = drawn_windows(data, tokenizer, samples=samples, more=0, sequence_length=sequence_length, seed=seed, bos=bos)
    return drawn.windows


def drawn_windows(
    data: str, tokenizer: Tokenizer, *, samples: int, more: int, sequence_length: int, seed: int, bos: Bos = "auto"
) -> DrawnWindows:
    """What `sample_windows` gives, and of what it leaves over, without overlap, so many windows `more`, or fewer where
    there are no more. Errors as there."""
    if samples < 1:
        raise UsageError(f"{samples} samples: give at least 1.")
    opening = opening_of(tokenizer, bos)
    _check_length(sequence_length, opening)
    sequence_length -= len(opening)
    specs = parse_data(data)
    generator = torch.Generator().manual_seed(seed)
    drawn, left, left_out = list[Tensor](), list[Tensor](), tuple[str, ...]()
    weights = [spec.weight for spec in specs]
    for spec, due, besides in zip(specs, _shares(samples, weights), _shares(more, weights), strict=True):
        if due == 0:
            continue
        if spec.is_bundled:
            readable = bundled_tokens(spec, tokenizer)
            found, left_out = readable.tokens, left_out + readable.left_out
            if not found:
                raise InvalidInputError("This tokenizer cuts all of the bundled text into bytes: give another text.")
            streams, dues = [*found.values()], _shares(due, [1.0] * len(found))
        else:
            limit = max(RESERVOIR_FACTOR * due * sequence_length, RESERVOIR_TOKENS)
            streams = [_read_tokens(spec, tokenizer, sequence_length, limit, SAMPLING_CHARS, len(opening))]
            dues = [due]
        pools = [_shuffled(*given, sequence_length, generator) for given in zip(streams, dues, strict=True)]
        takes = filled_shares(dues, [*map(len, pools)])
        rests = [pool[take:] for pool, take in zip(pools, takes, strict=True)]
        keeps = filled_shares(_shares(besides, [1.0] * len(rests)), [*map(len, rests)])
        drawn += [pool[:take] for pool, take in zip(pools, takes, strict=True)]
        left += [rest[:keep] for rest, keep in zip(rests, keeps, strict=True)]
    if not sum(map(len, drawn)):
        raise InvalidInputError(
            f"No text is as long as one window of {sequence_length + len(opening)} tokens: give a smaller "
            "--sequence-length."
        )
    windows, others = (_opened(interleaved_windows(parts), opening) for parts in (drawn, left))
    return DrawnWindows(windows, others, left_out)


def _shuffled(tokens: Tensor, due: int, sequence_length: int, generator: torch.Generator) -> Tensor:
    """A stream cut into consecutive windows from a random phase on, in random order; `due` of them are wanted."""
    count = len(tokens) // sequence_length
    # With windows to spare the phase may cost one; without, it only moves what the last one leaves over.
    room = sequence_length if count > due else len(tokens) - count * sequence_length + 1
    phase = int(torch.randint(room, (), generator=generator))
    windows = _cut(tokens[phase:], sequence_length)
    return windows[torch.randperm(len(windows), generator=generator)]


def evaluation_windows(
    data: str | DataSpec,
    tokenizer: Tokenizer,
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


def load_tokenizer(path: str | Path) -> Tokenizer:
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
    tokenizer: Tokenizer,
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
        shorter = f", or --sequence-length {count + opening} or less" if count + opening > 1 else ""
        raise InvalidInputError(
            f"{spec.source} has {count} tokens; one window needs {sequence_length}. Give more text{shorter}."
        )
    return torch.cat(parts)[:most]


def _cut(tokens: Tensor, sequence_length: int) -> Tensor:
    count = len(tokens) // sequence_length
    return tokens[: count * sequence_length].view(count, sequence_length)


def _opened(windows: Tensor, opening: Sequence[int]) -> Tensor:
    """Windows `[windows, length]` with the tokens of `opening` put before each."""
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
