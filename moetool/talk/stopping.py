"""Ends of answers: generation ends at stop words, which programs are not given, and errors in streams are told."""

import json
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from moetool.talk.conversation import Until
from moetool.talk.requests import error_body

_MARGIN = 8  # tokens decoded beyond those of a stop word, since what is decoded may begin inside of a character


class StopWords(StoppingCriteria):
    """Ends the generation of one answer as soon as its text has a stop word.

    transformers' own criterion fails at words that no tokens of the vocabulary begin or end with, such as a lone emoji.
    """

    def __init__(self, tokenizer: Any, signs: Sequence[str], prompt: int) -> None:
        """`prompt` is the number of tokens that come before the answer; `signs` are the stop words, at least one."""
        self._tokenizer, self._signs, self._prompt = tokenizer, signs, prompt
        self._tokens = max(len(sign.encode()) for sign in signs) + _MARGIN

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return a boolean `[1]`: whether the text of the answer in `input_ids` `[1, length]` has a stop word."""
        last = input_ids[0, max(self._prompt, input_ids.shape[1] - self._tokens) :]
        text = self._tokenizer.decode(last)
        return torch.tensor([any(sign in text for sign in self._signs)], device=input_ids.device)


def cut(answer: dict[str, Any], signs: Sequence[str]) -> dict[str, Any]:
    """An answer of `/v1/completions` or `/v1/chat/completions` up to its first stop word."""
    for choice in answer["choices"]:
        _Cut(signs)(choice, choice.get("message", choice))
    return answer


async def cut_events(events: AsyncGenerator[str, None], signs: Sequence[str]) -> AsyncGenerator[str, None]:
    """The same for the events of a stream; text that may be the beginning of a stop word waits for what follows."""
    passed = _Cut(signs)
    async for several in events:
        for event in filter(None, several.split("\n\n")):
            try:
                chunk = json.loads(event.removeprefix("data: "))
                [choice] = chunk["choices"]
            except (ValueError, KeyError):
                yield _told_error(event)
                continue
            if passed(choice, choice.get("delta", choice)):
                yield f"data: {json.dumps(chunk)}\n\n"


def _told_error(event: str) -> str:
    """An event that tells of an error as OpenAI's API does: transformers gives its text alone, of which programs only
    say that there was an error."""
    if found := re.fullmatch(r'data: \{"error": "(.*)"\}', event, re.DOTALL):
        return f"data: {json.dumps(error_body(found[1]))}\n\n"
    return f"{event}\n\n"


class _Cut:
    """Passes on choices of one answer, of which only text up to the first stop word is left."""

    def __init__(self, signs: Sequence[str]) -> None:
        self._passed: list[str] = []
        self._until = Until(self._passed.append, signs, trimmed=False)

    def __call__(self, choice: dict[str, Any], holder: dict[str, Any]) -> bool:
        """Cut the text of `holder`, which is the choice or a part of it; whether anything is left to tell."""
        key = "text" if holder is choice else "content"
        self._passed.clear()
        if text := holder.get(key):
            self._until(text)
        if choice.get("finish_reason") is not None:
            self._until.finish()
            if self._until.ended and choice["finish_reason"] == "length":
                choice["finish_reason"] = "stop"
        if told := "".join(self._passed):
            holder[key] = told
        elif text:
            holder[key] = ""
            return choice.get("finish_reason") is not None
        return True
