"""Training examples: token ids, and which of them the model is to learn to say."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.calibration.data import TEXT_COLUMNS, DataSpec, iter_text, parse_data, records
from moetool.calibration.opening import Bos, opening_of
from moetool.calibration.windows import token_stream
from moetool.checkpoint.source import first_line, is_here
from moetool.errors import InvalidInputError
from moetool.tune.chat import Conversations, Spoken, shortened, tokens_of, without_nones

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that is only read


@dataclass(frozen=True)
class Example:
    """Token ids and labels of one example, 4 bytes each; labels of tokens that are not learnt are `IGNORED`."""

    ids: Sequence[int]
    labels: Sequence[int]

    def __post_init__(self) -> None:
        same = self.labels is self.ids
        object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "labels", self.ids if same else array("i", self.labels))

    @property
    def prompt_end(self) -> int:
        """The place of the last token before the first that is learnt; the first token is never learnt."""
        return next((place for place, label in enumerate(self.labels) if place and label != IGNORED), 1) - 1


@dataclass
class Examples:
    """A data set, and what happened to it on the way.

    Attributes:
        items: the examples.
        truncated: how many were longer than the context and lost their end.
        silent: how many had nothing to learn, or lost it with their end, and were left out.
        ends_added: whether answers of conversations were given an end that the chat template does not write.
    """

    items: list[Example] = field(default_factory=list)
    truncated: int = 0
    silent: int = 0
    ends_added: bool = False

    @property
    def answer_tokens(self) -> int:
        """Number of tokens in all examples that contribute to the loss."""
        return sum(sum(label != IGNORED for label in item.labels[1:]) for item in self.items)

    def digest(self) -> str:
        """SHA-256 of all examples in hexadecimal, by which a resumed run checks that its data have not changed."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(len(item.ids).to_bytes(8, "little") + bytes(item.ids) + bytes(item.labels))
        return found.hexdigest()


def load_examples(data: str, tokenizer: "PreTrainedTokenizerBase", length: int, bos: Bos = "auto") -> Examples:
    """Every example of DATA, cut to `length` tokens.

    A record has `messages` (the tokenizer's chat template, loss on what the assistant says; see `Conversations`), or
    `prompt` and `completion`, as messages or as text (loss on the completion and the end of the text), or `text` or
    `content` (loss on all of it). A `.txt` file is one stream, cut into windows of `length`. The template says how
    conversations begin, and `bos` how all others do, see `opening_of`.

    Raises:
        UsageError: DATA cannot be parsed.
        InvalidInputError: a source cannot be read, has none of these columns, or needs a chat template that is not
            there, or another; or there is nothing to learn in any of it.
    """
    found, talks, opening = Examples(), Conversations(tokenizer), opening_of(tokenizer, bos)
    for spec in parse_data(data):
        for example in _examples(spec, tokenizer, length, talks, opening):
            if len(example.ids) > length:
                found.truncated += 1
                example = Example(example.ids[:length], example.labels[:length])
            if all(label == IGNORED for label in example.labels[1:]):
                found.silent += 1
            else:
                found.items.append(example)
    if not found.items and not found.silent:
        raise InvalidInputError(f"{data} is empty: it holds no record and no text.")
    if not found.items:
        raise InvalidInputError(
            f"{data} has nothing to learn: of {found.silent} examples, {found.truncated} of them cut at {length} "
            "tokens, none has a token of an answer."
        )
    found.ends_added = talks.adds_end
    return found


def check_first(data: str, tokenizer: "PreTrainedTokenizerBase", length: int, bos: Bos) -> None:
    """Read the first record of every source of DATA that is here, as `load_examples` reads all. Raises as that does."""
    talks, opening = Conversations(tokenizer), opening_of(tokenizer, bos)
    for spec in parse_data(data):
        if is_here(spec.source):
            next(_examples(spec, tokenizer, length, talks, opening), None)


def _examples(
    spec: DataSpec, tokenizer: "PreTrainedTokenizerBase", length: int, talks: Conversations, opening: Sequence[int]
) -> Iterator[Example]:
    if spec.is_bundled or spec.source.endswith(".txt") or spec.column is not None:
        yield from _windows(token_stream(tokenizer, iter_text(spec)), length, opening)
        return
    for number, record in enumerate(records(spec), start=1):
        try:
            yield from _of_record(record, tokenizer, talks, opening)
        except Exception as error:  # a chat template may raise whatever it likes, and records hold whatever they hold
            message = f"{spec.source}, record {number} cannot be used: {first_line(error).removesuffix('.')}."
            raise InvalidInputError(message) from error


def _windows(stream: Iterable[Sequence[int]], length: int, opening: Sequence[int]) -> Iterator[Example]:
    """Consecutive windows of `length` tokens, each of which begins with `opening`."""
    held = list(opening)
    for chunk in stream:
        held.extend(chunk)
        while len(held) >= length:
            window, held = held[:length], [*opening, *held[length:]]
            yield Example(window, window)
    if len(held) > max(1, len(opening)):
        yield Example(held, held)


def _of_record(
    record: Mapping[str, object], tokenizer: "PreTrainedTokenizerBase", talks: Conversations, opening: Sequence[int]
) -> Iterator[Example]:
    prompt, completion = record.get("prompt"), record.get("completion")
    if record.get("messages") is not None:
        yield from _of_conversation(record, record["messages"], 0, tokenizer, talks)
    elif isinstance(prompt, list) and isinstance(completion, list):
        yield from _of_conversation(record, [*prompt, *completion], len(prompt), tokenizer, talks)
    elif prompt is not None and completion is not None:
        asked, said = _text(prompt, "prompt"), _text(completion, "completion")
        yield _with_ends(tokenizer, Spoken(asked + said, ((len(asked), len(asked) + len(said)),)), opening)
    elif (name := next((own for own in TEXT_COLUMNS if record.get(own) is not None), None)) is not None:
        text = _text(record[name], name)
        yield _with_ends(tokenizer, Spoken(text, ((0, len(text)),)), opening)
    else:
        there = ", ".join(f"{name} (null)" if value is None else name for name, value in record.items()) or "nothing"
        raise InvalidInputError(f"it has none of messages, prompt and completion, text, content; it has {there}")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"its {name} has to be text, found {shortened(value)}")
    return value


def _with_ends(tokenizer: "PreTrainedTokenizerBase", spoken: Spoken, opening: Sequence[int]) -> Example:
    """A text after what the tokenizer begins with, and before the end token, which is learnt."""
    ids, learnt = tokens_of(tokenizer, spoken)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return example_of([*opening, *ids, *end], [*[False] * len(opening), *learnt, *[True] * len(end)])


def _of_conversation(
    record: Mapping[str, object],
    messages: object,
    first: int,
    tokenizer: "PreTrainedTokenizerBase",
    talks: Conversations,
) -> Iterator[Example]:
    if not isinstance(messages, list) or not messages:
        raise InvalidInputError("a conversation is a list of messages, each with a role and content")
    tools = record.get("tools")
    known = without_nones(json.loads(tools) if isinstance(tools, str) else tools) or None
    if known is not None and not isinstance(known, list):
        raise InvalidInputError(f"its tools have to be a list, found {shortened(known)}")
    for spoken in talks.spoken(messages, first, known):
        yield example_of(*tokens_of(tokenizer, spoken))


def example_of(ids: Sequence[int], learnt: Sequence[bool]) -> Example:
    """Make an example of token ids; those that are not `learnt` get a label that the loss ignores."""
    return Example(ids, [token if own else IGNORED for token, own in zip(ids, learnt, strict=True)])


def pack(examples: Sequence[Example], length: int) -> list[list[Example]]:
    """Examples that share a row of `length` tokens: longest first, each where it fits best. Each keeps to itself (see
    `collate`)."""
    rows: list[list[Example]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        needed = len(example.ids)
        room = next((room for room in range(needed, length + 1) if by_room[room]), None)
        if room is None:
            rows.append([])
            room, index = length, len(rows) - 1
        else:
            index = by_room[room].pop()
        rows[index].append(example)
        by_room[room - needed].append(index)
    return rows


def collate(rows: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
    """A batch from rows of any number of examples.

    Positions begin anew with every example, from which transformers sees where one ends: no token attends to another
    example, and none has to predict another's first token. `real` marks tokens that are not padding, `prompt_ends` the
    last token of every example before the first that is learnt (of padding, its first).
    """
    width = max(1, *(sum(len(example.ids) for example in row) for row in rows))
    batch = {
        "input_ids": torch.zeros((len(rows), width), dtype=torch.long),
        "labels": torch.full((len(rows), width), IGNORED),
        "position_ids": torch.zeros((len(rows), width), dtype=torch.long),
        "real": torch.zeros((len(rows), width), dtype=torch.bool),
        "prompt_ends": torch.zeros((len(rows), width), dtype=torch.bool),
    }
    for number, row in enumerate(rows):
        start = 0
        for example in row:
            stop = start + len(example.ids)
            batch["input_ids"][number, start:stop] = torch.tensor(example.ids)
            batch["labels"][number, start:stop] = torch.tensor(example.labels)
            batch["labels"][number, start] = IGNORED
            batch["position_ids"][number, start:stop] = torch.arange(stop - start)
            batch["real"][number, start:stop] = True
            batch["prompt_ends"][number, start + example.prompt_end] = True
            start = stop
        # Padding is an example of its own.
        batch["position_ids"][number, start:] = torch.arange(width - start)
        batch["prompt_ends"][number, start : start + 1] = True
    return batch
