"""Conversations written by a chat template, and which of their tokens a model is to learn.

An answer is what follows the prompt that asks for it: the template's rendering of everything before, with its
generation prompt, as `apply_chat_template(add_generation_prompt=True)` of transformers gives it to a user. Nothing is
looked for in a text: an answer may be any word of the template.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]] | None  # what a template is told of tools
Span = tuple[int, int]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_INS = ("Abc", "Xyz")  # two answers that have nothing in common at either end
_ANCHORS = ("", "\n", "a", ".", "0", ")", "|", "Q")


@dataclass(frozen=True)
class Spoken:
    """A text, and the places `[start, stop)` of it that are learnt."""

    text: str
    spans: tuple[Span, ...]


class Conversations:
    """A tokenizer's chat template.

    Every answer is learnt with the tokens that end its turn: what the template writes after it, as far as the first of
    its special tokens (all of them, if several stand side by side). Where the template writes none, the tokenizer's end
    token is added; `adds_end` tells.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.adds_end = False

    def spoken(self, messages: Sequence[Message], first: int = 0, tools: Tools = None) -> list[Spoken]:
        """A conversation as one text, or as several where the template writes answers differently once others follow.

        Each answer is learnt once, in the form in which it has to be said: after the prompt that would have asked for
        it. Templates with `{% generation %}` markers say themselves what is learnt, in one text.

        Args:
            messages: with `role`, `content` and what else the template reads.
            first: answers before this message are only read.
            tools: what the template is told of tools.

        Raises:
            InvalidInputError: there is no template, or it does not begin a conversation as it prompts for its answer.
        """
        template = self._template(tools)
        messages = [_clean(message) for message in messages]
        if _MARKER.search(template):
            return [self._marked(template, messages, first, tools)]
        found: dict[str, list[Span]] = {self._written(messages, tools): []}
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number in reversed([number for number in answers if number >= first]):
            text, start, stop = self._answer(messages[: number + 1], tools)
            holder = next((other for other in found if other.startswith(text[:stop])), text)
            found.setdefault(holder, []).insert(0, (start, stop))
        spoken = [Spoken(text, tuple(spans)) for text, spans in found.items() if spans]
        return spoken[::-1] or [Spoken(text, ()) for text in found]

    def _template(self, tools: Tools) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidInputError(
                "this is a conversation, and the tokenizer has no chat template. Take an instruction-tuned model's "
                "tokenizer, or give prompt and completion"
            )
        return str(self._tokenizer.get_chat_template(None, tools))

    def _written(self, messages: Sequence[Message], tools: Tools, *, prompts: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompts
            )
        )

    def _answer(self, messages: Sequence[Message], tools: Tools) -> tuple[str, int, int]:
        """The text of a conversation that ends with an answer, and where in it that answer begins and ends."""
        text = self._written(messages, tools)
        before, answer = messages[:-1], messages[-1]
        if answer.get("tool_calls") and text == self._without_calls(messages, tools):
            raise InvalidInputError("the chat template does not write tool calls: they would not be learnt")
        if before:
            prompt = self._written(before, tools, prompts=True)
        else:
            prompt = _common(*(self._written([{**answer, "content": said}], tools) for said in _STAND_INS))
        if not text.startswith(prompt):
            common = len(_common(text, prompt))
            raise InvalidInputError(
                f"the chat template prompts for an answer with {shortened(prompt[common:])}, but writes "
                f"{shortened(text[common:])} there once it is given, so that nothing can be learnt of it. Take a "
                "template with {% generation %} markers, or messages that it writes as they are asked for"
            )
        length, ends = self._turn(text[len(prompt) :])
        stop = len(prompt) + length
        if not ends:
            text = text[:stop] + self._end_token()
            stop = len(text)
        return text, len(prompt), stop

    def _turn(self, said: str) -> tuple[int, bool]:
        """How much of what follows a prompt, at the end of a conversation, is the answer's turn, and whether a special
        token ends it."""
        end = self._end
        if end is not None and said.endswith(end):
            match = self._special.search(end)
            return len(said) - len(end) + (match.end() if match else len(end.rstrip())), match is not None
        last = max((match.end() for match in self._special.finditer(said)), default=0)  # after a tool call, say
        return last or len(said), last > 0

    def _without_calls(self, messages: Sequence[Message], tools: Tools) -> str | None:
        silent = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
        try:
            return self._written([*messages[:-1], {"content": "", **silent}], tools)
        except Exception:  # a template may insist on them
            return None

    @cached_property
    def _end(self) -> str | None:
        """All that the template writes after an answer that ends the conversation; `None` if it cannot be told."""
        asked = {"role": "user", "content": "?"}
        try:
            texts = [self._written([asked, {"role": "assistant", "content": said}], None) for said in _STAND_INS]
        except Exception:  # whatever a template raises
            return None
        if not all(said in text for text, said in zip(texts, _STAND_INS, strict=True)):
            return None
        return _common(*(text[::-1] for text in texts))[::-1]

    @cached_property
    def _closing(self) -> str | None:
        """As much of the template's end of a turn as ends it, or `None`."""
        found = self._special.search(self._end or "")
        return None if found is None else (self._end or "")[: found.end()]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """One or more tokens side by side that are no ordinary text."""
        added = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        tokens = sorted((token for token in added | set(self._tokenizer.all_special_tokens) if token.strip()), key=len)
        return re.compile("(?:" + "|".join(map(re.escape, reversed(tokens))) + ")+" if tokens else r"(?!)")

    def _end_token(self) -> str:
        if not self._tokenizer.eos_token:
            raise InvalidInputError(
                "neither the chat template nor the tokenizer has a token that ends an answer: it would never end"
            )
        self.adds_end = True
        return str(self._tokenizer.eos_token)

    def _marked(self, template: str, messages: Sequence[Message], first: int, tools: Tools) -> Spoken:
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), (marks,) = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        if first:
            prompt = self._written(messages[:first], tools, prompts=True)
            begins = len(_common(text, prompt))
            marks = [(start, stop) for start, stop in marks if stop > begins]
        spans = [(start, self._extended(text, start, stop)) for start, stop in marks]
        edges = [edge for span in spans for edge in span]
        if edges != sorted(edges) or (edges and edges[-1] > len(text)):
            raise InvalidInputError("the chat template's {% generation %} markers are not where its text is")
        return Spoken(text, tuple((start, stop) for start, stop in spans if stop > start))

    def _extended(self, text: str, start: int, stop: int) -> int:
        """Where the turn ends, if the markers leave that out."""
        closing = self._closing or ""
        for inside in range(len(closing), -1, -1):
            if text[start:stop].endswith(closing[:inside]) and text.startswith(closing[inside:], stop):
                return stop + len(closing) - inside
        return stop


def tokens_of(tokenizer: "PreTrainedTokenizerBase", spoken: Spoken) -> tuple[list[int], list[bool]]:
    """The token ids of a text, without special tokens that are not written in it, and which of them are learnt.

    What comes before an answer is tokenised as it is when it stands alone, which is what a model is prompted with:
    where a token would reach across the edge of an answer, the text is cut there.

    Raises:
        InvalidInputError: the tokenizer cannot tokenise a text in pieces.
    """
    edges = [edge for span in spoken.spans for edge in span]
    ids, *prefixes = _ids(tokenizer, spoken.text, *(spoken.text[:edge] for edge in edges))
    places = [len(prefix) for prefix in prefixes]
    if any(ids[: len(prefix)] != prefix for prefix in prefixes):
        ids, places = _in_pieces(tokenizer, spoken.text, edges)
    learnt = [False] * len(ids)
    for start, stop in zip(places[::2], places[1::2], strict=True):
        learnt[start:stop] = [True] * (stop - start)
    return ids, learnt


def _in_pieces(tokenizer: "PreTrainedTokenizerBase", text: str, edges: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids of a text that is cut at `edges`, and where these are among them."""
    ids: list[int] = []
    places: list[int] = []
    for start, stop in pairwise((0, *edges, len(text))):
        ids += _continued(tokenizer, ids, text[:stop], start)
        places.append(len(ids))
    return ids, places[:-1]


def _continued(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], text: str, start: int) -> list[int]:
    """The token ids of `text[start:]`, which come after `ids`, those of all before it."""
    if start == len(text):
        return []
    wanted = _decoded(tokenizer, _ids(tokenizer, text)[0])
    for anchor in _ANCHORS if start else ("",):  # some tokenizers put a space before whatever comes first
        before = _ids(tokenizer, anchor)[0] if anchor else []
        (both,) = _ids(tokenizer, anchor + text[start:])
        if both[: len(before)] == before and _decoded(tokenizer, [*ids, *both[len(before) :]]) == wanted:
            return both[len(before) :]
    raise InvalidInputError(
        f"the tokenizer cannot begin anew at {shortened(text[start:])}, where an answer begins or ends"
    )


def _ids(tokenizer: "PreTrainedTokenizerBase", *texts: str) -> list[list[int]]:
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    return [list(ids) for ids in found]


def _decoded(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _clean(message: object) -> Message:
    """A message without what records of other kinds have beside it, its text as a string."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInputError(f"a message has to have a role and content, found {shortened(message)}")
    found = {key: without_nones(held) for key, held in message.items() if held is not None}
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        found["content"] = "".join(str(part["text"]) for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidInputError(f"the content of a message has to be text, found {shortened(content)}")
    return found


def without_nones(value: object) -> object:
    """A record without the keys that hold `None`: tables give every record the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nones(held) for key, held in value.items() if held is not None}
    return [without_nones(held) for held in value] if isinstance(value, list) else value


def _common(first: str, second: str) -> str:
    """What two texts begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))]


def shortened(value: object) -> str:
    """A value as an error names it: as JSON, cut to 60 characters."""
    shown = json.dumps(value, default=str, ensure_ascii=False)
    return shown if len(shown) <= 60 else f"{shown[:56]} …"
