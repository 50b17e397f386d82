"""Training examples: token ids, and which of them the model is to learn to say."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.calibration.data import DataSpec, iter_text, parse_data, records, token_stream
from moetool.checkpoint.source import first_line
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that is only read


@dataclass(frozen=True)
class Example:
    """Token ids, and the same with `IGNORED` where nothing is learnt, 4 bytes each."""

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
    """

    items: list[Example] = field(default_factory=list)
    truncated: int = 0
    silent: int = 0

    @property
    def answer_tokens(self) -> int:
        """Tokens that the loss is taken over."""
        return sum(sum(label != IGNORED for label in item.labels[1:]) for item in self.items)

    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal: a resumed run must go on with what it began with."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(len(item.ids).to_bytes(8, "little") + bytes(item.ids) + bytes(item.labels))
        return found.hexdigest()


def load_examples(data: str, tokenizer: "PreTrainedTokenizerBase", length: int) -> Examples:
    """Every example of DATA, cut to `length` tokens.

    A record has `messages` (the tokenizer's chat template, loss on what the assistant says), or `prompt` and
    `completion` (loss on the completion and the end of the text), or `text` (loss on all of it). A `.txt` file is one
    stream, cut into windows of `length`.

    Raises:
        UsageError: DATA cannot be parsed.
        InvalidInputError: a source cannot be read, has none of these columns, or needs a chat template that is not
            there; or there is nothing to learn in any of it.
    """
    found = Examples()
    for spec in parse_data(data):
        for example in _examples(spec, tokenizer, length):
            if len(example.ids) > length:
                found.truncated += 1
                example = Example(example.ids[:length], example.labels[:length])
            if all(label == IGNORED for label in example.labels[1:]):
                found.silent += 1
            else:
                found.items.append(example)
    if not found.items:
        raise InvalidInputError(
            f"{data} has nothing to learn: of {found.silent} examples, {found.truncated} of them cut at {length} "
            "tokens, none has a token of an answer."
        )
    return found


def _examples(spec: DataSpec, tokenizer: "PreTrainedTokenizerBase", length: int) -> Iterator[Example]:
    if spec.source.endswith(".txt") or spec.column is not None:
        yield from _windows(token_stream(tokenizer, iter_text(spec)), length)
        return
    for number, record in enumerate(records(spec), start=1):
        where = f"{spec.source}, record {number}"
        try:
            yield _example(record, tokenizer, where)
        except InvalidInputError:
            raise
        except Exception as error:  # a chat template may raise whatever it likes, and records hold whatever they hold
            raise InvalidInputError(f"{where} cannot be used: {first_line(error)}.") from error


def _windows(stream: Iterable[Sequence[int]], length: int) -> Iterator[Example]:
    held: list[int] = []
    for chunk in stream:
        held.extend(chunk)
        while len(held) >= length:
            window, held = held[:length], held[length:]
            yield Example(window, window)
    if len(held) > 1:
        yield Example(held, held)


def _example(record: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", where: str) -> Example:
    if record.get("messages") is not None:
        return _chat(record["messages"], tokenizer, where)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        return _chat([*record["prompt"], *record["completion"]], tokenizer, where)
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt = _ids(tokenizer, record["prompt"], special=True)
        answer = [*_ids(tokenizer, record["completion"]), *end]
        return Example(prompt + answer, [IGNORED] * len(prompt) + answer)
    if record.get("text") is not None:
        ids = _ids(tokenizer, record["text"], special=True) + end
        return Example(ids, ids)
    there = ", ".join(record) or "nothing"
    raise InvalidInputError(f"{where} has none of messages, prompt and completion, text; it has {there}.")


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str, *, special: bool = False) -> list[int]:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    # The end of the text is for the end of the answer.
    return ids[:-1] if special and ids and ids[-1] == tokenizer.eos_token_id else list(ids)


def _chat(messages: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", where: str) -> Example:
    """A conversation in the template's words; what the assistant says, and what ends its turn, is learnt.

    The conversation is written once, as a whole (templates write a turn differently when others follow), and every
    message is looked for where it must be.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            f"{where} is a conversation, and the tokenizer has no chat template. Take an instruction-tuned model's "
            "tokenizer, or give prompt and completion."
        )
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False)
    end_of_turn = str(tokenizer.eos_token or "")
    answers: list[tuple[int, int]] = []
    position = 0
    for message in messages:
        said = str(message.get("content") or "").strip()
        start = text.find(said, position)
        if start < 0:
            raise InvalidInputError(f"{where}: the chat template does not write a message as it is: {said[:60]!r}.")
        position = start + len(said)
        if message.get("role") == "assistant" and said:
            closing = text.find(end_of_turn, position, position + len(end_of_turn) + 8) if end_of_turn else -1
            answers.append((start, position if closing < 0 else closing + len(end_of_turn)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    learnt = [any(start <= first < stop for start, stop in answers) for first, _ in encoded["offset_mapping"]]
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


def collate(rows: Sequence[Sequence[Example]], padding: int) -> dict[str, Tensor]:
    """A batch from rows of one or more examples.

    Positions begin anew with every example, from which transformers sees where one ends: no token attends to another
    example, and none has to predict another's first token. `real` marks tokens that are not padding, `prompt_ends` the
    last token of every example before the first that is learnt (of padding, its first).
    """
    width = max(sum(len(example.ids) for example in row) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), width), padding),
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
