"""Training examples: token ids, and which of them the model is to learn to say."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.calibration.data import DataSpec, iter_text, parse_data, records, token_stream
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that is only read


@dataclass(frozen=True)
class Example:
    """Token ids, and the same with `IGNORED` where nothing is learnt."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


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
        yield _example(record, tokenizer, f"{spec.source}, record {number}")


def _windows(stream: Iterable[Sequence[int]], length: int) -> Iterator[Example]:
    held: list[int] = []
    for chunk in stream:
        held.extend(chunk)
        while len(held) >= length:
            window, held = tuple(held[:length]), held[length:]
            yield Example(window, window)
    if len(held) > 1:
        yield Example(tuple(held), tuple(held))


def _example(record: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", where: str) -> Example:
    if record.get("messages") is not None:
        return _chat(record["messages"], tokenizer, where)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt = _ids(tokenizer, record["prompt"], special=True)
        answer = [*_ids(tokenizer, record["completion"]), *end]
        return Example((*prompt, *answer), (*[IGNORED] * len(prompt), *answer))
    if record.get("text") is not None:
        ids = (*_ids(tokenizer, record["text"], special=True), *end)
        return Example(ids, ids)
    there = ", ".join(record) or "nothing"
    raise InvalidInputError(f"{where} has none of messages, prompt and completion, text; it has {there}.")


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str, *, special: bool = False) -> list[int]:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    # The end of the text is for the end of the answer.
    return ids[:-1] if special and ids and ids[-1] == tokenizer.eos_token_id else list(ids)


def _chat(messages: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", where: str) -> Example:
    """A conversation in the template's words; what the assistant says, and what ends its turn, is learnt."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            f"{where} is a conversation, and the tokenizer has no chat template. Take an instruction-tuned model's "
            "tokenizer, or give prompt and completion."
        )
    ids: list[int] = []
    labels: list[int] = []
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _rendered(tokenizer, messages[:turn], answer_next=True)
        through = _rendered(tokenizer, messages[: turn + 1], answer_next=False)
        if through[: len(before)] != before or before[: len(ids)] != ids:
            raise InvalidInputError(
                f"{where}: the chat template does not write a conversation from left to right, so what the assistant "
                "says cannot be told apart. Give prompt and completion."
            )
        labels += [IGNORED] * (len(before) - len(ids)) + through[len(before) :]
        ids = through
    return Example(tuple(ids), tuple(labels))


def _rendered(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], *, answer_next: bool
) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer_next)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def pack(examples: Sequence[Example], length: int) -> list[list[Example]]:
    """Examples that share a row of `length` tokens: first fit, longest first. Each keeps to itself (see `collate`)."""
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        index = next((i for i, left in enumerate(room) if left >= len(example.ids)), None)
        if index is None:
            rows.append([])
            room.append(length)
            index = len(rows) - 1
        rows[index].append(example)
        room[index] -= len(example.ids)
    return rows


def collate(rows: Sequence[Sequence[Example]], padding: int) -> dict[str, Tensor]:
    """A batch from rows of one or more examples.

    Positions begin anew with every example, from which transformers sees where one ends: no token attends to another
    example, and none has to predict another's first token. `real` marks tokens that are not padding.
    """
    width = max(sum(len(example.ids) for example in row) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), width), padding),
        "labels": torch.full((len(rows), width), IGNORED),
        "position_ids": torch.zeros((len(rows), width), dtype=torch.long),
        "real": torch.zeros((len(rows), width), dtype=torch.bool),
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
            start = stop
        # Padding is an example of its own.
        batch["position_ids"][number, start:] = torch.arange(width - start)
    return batch
