"""A conversation with a model, whatever runs it: its messages, and how they are written without a chat template."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moetool.measure.generation import check_unicode

Write = Callable[[str], None]
Turn = dict[str, str]  # role and content, as chat templates take them

STOP = "\nUser:"  # where a model without a chat template begins to speak for the user


@dataclass(frozen=True)
class Answer:
    """What a model has said.

    Attributes:
        text: without the spaces around it.
        tokens: that were generated.
        seconds: from the question's end to the answer's.
    """

    text: str
    tokens: int
    seconds: float


class Talker(Protocol):
    """Runs a model.

    Attributes:
        has_template: whether the model has a chat template; without one, messages are written as plain text.
    """

    has_template: bool

    def answer(self, messages: Sequence[Turn], write: Write) -> tuple[str, int]:
        """Text that follows on messages, and its number of tokens; `write` gets the text as it comes."""
        ...


@dataclass
class Conversation:
    """A conversation: its messages so far, and the model that answers them."""

    talker: Talker
    system: str | None = None
    messages: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for a system message that is not Unicode."""
        check_unicode("The system message", self.system or "")
        self.reset()

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str, write: Write) -> Answer:
        """Ask, and note question and answer; a question that fails is forgotten.

        Raises:
            UsageError: the conversation has become longer than the model's positions.
            InvalidInputError: the chat template cannot write it, or it is not Unicode.
            VerificationError: the model gives NaN or infinity.
        """
        check_unicode("The message", text)
        start = time.perf_counter()
        asked = [*self.messages, {"role": "user", "content": text}]
        said, tokens = self.talker.answer(asked, write)
        said = said.strip()
        self.messages = [*asked, {"role": "assistant", "content": said}]
        return Answer(said, tokens, time.perf_counter() - start)


def plain_prompt(messages: Sequence[Turn]) -> str:
    """Messages as text that ends where the answer begins, for a model without a chat template."""
    names = {"user": "User: ", "assistant": "Assistant: "}
    return "\n".join([*(names.get(own["role"], "") + own["content"] for own in messages), "Assistant:"])


class Until:
    """Passes text on as it comes, up to the first of some signs that end it, which is left out.

    Attributes:
        text: all that was passed on.
        ended: whether a sign was found.
    """

    def __init__(self, write: Write, signs: Sequence[str], *, trimmed: bool = True) -> None:
        """Text is passed on to `write`, without its leading spaces if `trimmed`."""
        self._write, self._signs, self._trimmed = write, signs, trimmed
        self._held, self.text, self.ended = "", "", False

    def __call__(self, piece: str) -> None:
        if self.ended:
            return
        self._held += piece
        if found := [at for sign in self._signs if (at := self._held.find(sign)) >= 0]:
            self._held, self.ended = self._held[: min(found)], True
            self._pass(len(self._held))
        else:  # the end of it may be the beginning of a sign
            begun = (n for sign in self._signs for n in range(1, len(sign)) if self._held.endswith(sign[:n]))
            self._pass(len(self._held) - max(begun, default=0))

    def finish(self) -> None:
        """Pass on the text that was held back as a possible beginning of a sign."""
        if not self.ended:
            self._pass(len(self._held))

    def _pass(self, count: int) -> None:
        piece, self._held = self._held[:count], self._held[count:]
        if piece := piece.lstrip() if self._trimmed and not self.text else piece:
            self.text += piece
            self._write(piece)
