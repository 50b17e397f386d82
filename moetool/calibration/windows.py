"""Text to windows of tokens, for calibration and for evaluation."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from moetool.architectures.base import whole_number
from moetool.calibration.bundled import kinds
from moetool.calibration.cutting import consecutive_windows, shuffled_windows
from moetool.calibration.data import BUNDLED, DataSpec, check_data, iter_text, parse_data
from moetool.calibration.mixing import MixedSources, TextCounts, shared_out, taking_turns
from moetool.calibration.opening import Bos, Tokenizer, opening_of
from moetool.calibration.readable import BundledWindows, readable_text
from moetool.checkpoint.names import CONFIG, TOKENIZER, check_has_tokenizer
from moetool.checkpoint.reader import read_config
from moetool.checkpoint.settings import settings_of
from moetool.checkpoint.source import first_line, local_path, looks_local
from moetool.errors import InvalidInputError, UsageError

# Keys of the tokens in whose place a model is given something else than text.
_PLACE = re.compile(r"(image|video|audio)_token_(?:id|index)")
_GIVEN = {"image": "an image", "video": "a video", "audio": "sound"}
# Fast tokenizers take up to 450 bytes per token while they work: 1.3 GB for so much text to evaluate on.
WHOLE_TEXT_CHARS = 8 << 20
SAMPLING_CHARS = 1 << 18  # of calibration text: 70 MB, which jobs have within `baseline`
# Windows are drawn from at least this many tokens, and from this many times what is asked for.
RESERVOIR_TOKENS = 1 << 20
RESERVOIR_FACTOR = 16

# Source, windows, tokens in each without those that it begins with → int64 `[windows, tokens]` of the model's own text.
OwnText: TypeAlias = Callable[[DataSpec, int, int], Tensor]


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
    """Windows that were drawn from one text.

    Attributes:
        windows: int64 `[samples, length]`, or fewer where there are no more.
        others: of what is left, without overlap.
        remarks: what became otherwise than was asked for, in sentences.
        counts: windows by text.
        kinds: of the text in these windows, by name: those of the bundled text, and of another source the name of its
            file, folder or data set.
        of_kind: which of `kinds` each window is of, int64 `[samples]`.
        others_of_kind: as `of_kind`, of `others`.
    """

    windows: Tensor
    others: Tensor
    remarks: tuple[str, ...]
    counts: TextCounts
    kinds: tuple[str, ...]
    of_kind: Tensor
    others_of_kind: Tensor


def sample_windows(
    data: str, tokenizer: Tokenizer, *, samples: int, sequence_length: int, seed: int, bos: Bos = "auto"
) -> Tensor:
    """Windows drawn at random from one or several sources: int64 `[samples, sequence_length]`.

    Every source's stream is trimmed by a random phase and cut into consecutive windows, from which as many as are due
    to its weight are drawn without replacement: they never overlap. Of a long stream only the beginning is read:
    16 times as many windows as are due, and at least a million tokens. A source with too few windows gives all of
    them, so that fewer than `samples` may come back; the caller sees it from the shape. Of the bundled text each kind
    gives as many, without the pieces that the tokenizer cannot read; where one has too few, others stand in. Windows
    of several texts take turns.

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
    data: str,
    tokenizer: Tokenizer,
    *,
    samples: int,
    more: int,
    sequence_length: int,
    seed: int,
    bos: Bos = "auto",
    mix: float = 0.0,
    insist: bool = False,
    own: OwnText | None = None,
) -> DrawnWindows:
    """Draw the windows of `sample_windows`, and `more` others without overlap from what these leave over, or fewer
    where there are no more.

    Of both a share `mix` is of the bundled text, unless DATA names that itself; what it lacks is taken from DATA.
    Windows of the model's `own` text are all among the first.

    Raises:
        UsageError: as `sample_windows`.
        InvalidInputError: as there; or the bundled text has no window for this tokenizer, and DATA is nothing else, or
            the caller does `insist` on its share.
    """
    if samples < 1:
        raise UsageError(f"{samples} samples: give at least 1.")
    opening = opening_of(tokenizer, bos)
    _check_length(sequence_length, opening)
    length = sequence_length - len(opening)
    specs = parse_data(data)
    due = MixedSources.of(specs, samples, mix)
    besides = MixedSources.of(
        [replace(spec, weight=0.0) if spec.is_self else spec for spec in specs],
        0 if all(spec.is_self for spec in specs) else more,
        mix,
    )
    bundled = BundledWindows(due.bundled, tokenizer, length=length, seed=seed)
    drawn, left = bundled.drawn, bundled.take(besides.bundled)
    if insist or not due.is_mixed:
        bundled.check("--mix 0" if due.is_mixed else "another text")
    dues, furthers = ([count for *_, count in each.given] for each in (due, besides))
    if due.is_mixed:  # the sources that were given have the rest, whatever it is
        weights = [spec.weight for spec in specs]
        dues, furthers = (
            shared_out(count - sum(map(len, taken.values())), weights)
            for count, taken in ((samples, drawn), (more, left))
        )
    generator = torch.Generator().manual_seed(seed)
    parts, rests = dict[str, Tensor](), dict[str, Tensor]()
    for (spec, name, _), count, further in zip(due.given, dues, furthers, strict=True):
        if count and own is not None and spec.is_self:
            parts[name], rests[name] = own(spec, count, length), torch.empty(0, length, dtype=torch.int64)
        elif count:
            limit = max(RESERVOIR_FACTOR * count * length, RESERVOIR_TOKENS)
            tokens = _read_tokens(spec.source, iter_text(spec), tokenizer, length, limit, SAMPLING_CHARS, len(opening))
            pool = shuffled_windows(tokens, count, length, generator)
            parts[name], rests[name] = pool[:count], pool[count : count + further]
    counts = TextCounts(
        {name: len(own) for name, own in parts.items()}, {kind: len(own) for kind, own in drawn.items()}
    )
    parts |= {kind: torch.stack(own) for kind, own in drawn.items() if own}
    rests |= {kind: torch.stack(own) for kind, own in left.items() if own}
    kinds = tuple(dict.fromkeys([*parts, *(name for name, rest in rests.items() if len(rest))]))
    windows, of_kind = _together(parts, kinds, length)
    others, others_of_kind = _together(rests, kinds, length)
    opened, others = _opened(windows, opening), _opened(others, opening)
    return DrawnWindows(opened, others, tuple(bundled.remarks()), counts, kinds, of_kind, others_of_kind)


def _together(parts: Mapping[str, Tensor], kinds: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Windows `[windows, length]` of several texts, which take turns, and of which of `kinds` each is, `[windows]`."""
    there = {kinds.index(name): part for name, part in parts.items() if len(part)}
    counts = [len(part) for part in there.values()]
    order = taking_turns(counts)
    numbers = torch.tensor([*there], dtype=torch.int64).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return torch.cat([torch.empty(0, length, dtype=torch.int64), *there.values()])[order], numbers[order]


class TextWindows(NamedTuple):
    """Windows of one text.

    Attributes:
        name: as the text was given, without a weight; of a kind of the bundled text `bundled:KIND`.
        windows: int64 `[windows, length]`.
    """

    name: str
    windows: Tensor


class EvaluationTexts(NamedTuple):
    """Several texts to evaluate on.

    Attributes:
        texts: in the order given; of `bundled`, one for each of its kinds.
        left_out: `kind/name` of the pieces of the bundled text that the tokenizer cannot read.
    """

    texts: tuple[TextWindows, ...]
    left_out: tuple[str, ...]


def evaluation_texts(
    data: str,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    limit: int | None = None,
    bos: Bos = "auto",
) -> EvaluationTexts:
    """Consecutive windows over all of each text, the rest of each dropped.

    Args:
        data: one source, or several; every kind of the bundled text is a text of its own.
        tokenizer: a transformers tokenizer.
        sequence_length: tokens in a window, those that it begins with among them.
        limit: the most windows of each text; of a file no more is read than they take.
        bos: what a window begins with, see `opening_of`.

    Raises:
        UsageError: numbers out of range, DATA that cannot be parsed, a text that is named twice, or weights, which
            mean nothing here.
        InvalidInputError: a source cannot be read, or is shorter than one window.
    """
    opening = opening_of(tokenizer, bos)
    _check_length(sequence_length, opening)
    sequence_length -= len(opening)
    if limit is not None and limit < 1:
        raise UsageError(f"A limit of {limit} windows: give at least 1.")
    specs = check_data(data)
    if any(spec.weight != 1 for spec in specs):
        raise UsageError("Evaluation takes every window of the data: leave out the @weights.")
    most = None if limit is None else limit * sequence_length
    found, left_out = list[TextWindows](), tuple[str, ...]()
    for spec in specs:
        if spec.is_bundled:
            readable = readable_text(kinds(spec.config), tokenizer)
            left_out += readable.left_out
            if not readable.texts:
                raise InvalidInputError(f"This tokenizer cuts all of {spec.written} into bytes: give another text.")
            named: dict[str, Iterable[str]] = {f"{BUNDLED}:{kind}": [text] for kind, text in readable.texts.items()}
        else:
            named = {spec.written: iter_text(spec)}
        for name, text in named.items():
            if name in (other.name for other in found):
                raise UsageError(f"{name} is named twice: leave one out.")
            tokens = _read_tokens(name, text, tokenizer, sequence_length, most, WHOLE_TEXT_CHARS, len(opening))
            found.append(TextWindows(name, _opened(consecutive_windows(tokens, sequence_length), opening)))
    return EvaluationTexts(tuple(found), left_out)


def evaluation_windows(
    data: str,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    limit: int | None = None,
    bos: Bos = "auto",
) -> Tensor:
    """The windows of all texts of `evaluation_texts`, one text after the other: int64 `[windows, sequence_length]`.
    Arguments and errors as there."""
    found = evaluation_texts(data, tokenizer, sequence_length=sequence_length, limit=limit, bos=bos)
    return torch.cat([text.windows for text in found.texts])


def check_vocabulary(windows: Tensor, vocab_size: int | None) -> None:
    """Raise `InvalidInputError` if a token is none of the model's `vocab_size`: the tokenizer is another model's. Not
    if that is not known (`None`)."""
    if vocab_size is not None and windows.numel() and not 0 <= (highest := int(windows.max())) < vocab_size:
        raise InvalidInputError(
            f"The text has token {highest}, but the model's vocabulary ends at {vocab_size - 1}: "
            "the tokenizer does not belong to this model."
        )


def check_tokens(windows: Tensor, settings: Mapping[str, object]) -> None:
    """Check the tokens of a text against the settings of the model that is to read it.

    Raises:
        InvalidInputError: a token is none of its vocabulary, or stands for an image, a video or sound: text alone is
            given to models.
    """
    check_vocabulary(windows, whole_number(settings, "vocab_size"))
    for key, token in settings.items():
        if isinstance(token, int) and (found := _PLACE.fullmatch(key)) and bool((windows == token).any()):
            raise InvalidInputError(
                f"The text has token {token}, in whose place the model is given {_GIVEN[found[1]]} ({key}): moetool "
                "gives models text alone. Take these tokens out of it."
            )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint; a local directory is all that is looked at, if there is one.

    Raises:
        InvalidInputError: there is none, it cannot be loaded without running code of the checkpoint, or transformers
            refuses the `config.json` beside it.
    """
    from transformers import AutoTokenizer

    directory = local_path(path)
    local = directory.is_dir()
    name = str(directory) if local else str(path)
    if not local and (isinstance(path, Path) or looks_local(name)):
        raise InvalidInputError(f"No such directory: {path}.")
    if local:
        check_has_tokenizer(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        tokenizer("some text", add_special_tokens=False, verbose=False)  # some nonsense in files only shows here
        return tokenizer
    except Exception as error:  # each tokenizer class fails in its own way on files that it cannot use
        if (directory / CONFIG).is_file():  # which some read, too
            settings_of(read_config(directory)[1], directory)
        told = f"Cannot load the tokenizer of {path}: {first_line(error)}."
        raise InvalidInputError(told + _advice(directory)) from error


def _advice(directory: Path) -> str:
    """What to do about a tokenizer that transformers cannot make of the files in a directory."""
    if not directory.is_dir() or (directory / TOKENIZER).is_file():
        return ""
    return f" A {TOKENIZER} in {directory} would do: copy that of the original model there."


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
    name: str,
    text: Iterable[str],
    tokenizer: Tokenizer,
    sequence_length: int,
    most: int | None,
    chunk_chars: int,
    opening: int,
) -> Tensor:
    """The first `most` tokens of a text, int64 `[tokens]`, at least `sequence_length`, which with as many as a window
    begins with make one."""
    parts: list[Tensor] = []
    count = 0
    for ids in token_stream(tokenizer, text, chunk_chars):
        parts.append(torch.tensor(ids, dtype=torch.int64))
        count += len(ids)
        if most is not None and count >= most:
            break
    if count == 0:
        raise InvalidInputError(f"{name} has no text.")
    if count < sequence_length:
        shorter = f", or --sequence-length {count + opening} or less" if count + opening > 1 else ""
        raise InvalidInputError(
            f"{name} has {count} tokens; one window needs {sequence_length}. Give more text{shorter}."
        )
    return torch.cat(parts)[:most]


def _opened(windows: Tensor, opening: Sequence[int]) -> Tensor:
    """Windows `[windows, length]` with the tokens of `opening` put before each."""
    return torch.cat([torch.tensor(opening, dtype=torch.int64).expand(len(windows), -1), windows], dim=1)


def _check_length(sequence_length: int, opening: Sequence[int]) -> None:
    least = max(2, len(opening) + 1)
    if sequence_length < least:
        raise UsageError(
            f"A sequence length of {sequence_length}: give at least {least}, one token to predict another."
        )
