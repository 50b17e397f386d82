"""Answers of a GGUF file, by llama-cpp-python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from moetool.errors import InvalidInputError, UsageError
from moetool.talk.conversation import STOP, Turn, Until, Write, plain_prompt
from moetool.talk.options import ChatOptions

MISSING = (
    "{file} is run by llama.cpp, and the library llama-cpp-python is not installed: pip install 'moetool[llama-cpp]'. "
    "Without it, `moetool generate` reads the file in 16 bits."
)
ALL_LAYERS = -1  # of those that are put on a card, where llama.cpp was built for one


class GgufTalker:
    """A GGUF file in llama.cpp, with a context of as many tokens as the file says, or `--context`."""

    def __init__(self, file: Path, options: ChatOptions) -> None:
        """Load it.

        Raises:
            UsageError: llama-cpp-python is not installed.
            InvalidInputError: llama.cpp cannot load the file.
        """
        try:
            from llama_cpp import Llama
        except ImportError as error:
            raise UsageError(MISSING.format(file=file)) from error
        try:
            self._llama: Any = Llama(
                str(file),
                n_ctx=options.context or 0,
                n_gpu_layers=0 if options.device == "cpu" else ALL_LAYERS,
                seed=options.seed,
                verbose=False,
            )
        except ValueError as error:
            raise InvalidInputError(
                f"llama.cpp cannot load {file}: {error}. If memory is short, give a smaller --context."
            ) from error
        self._options = options
        self.has_template = "tokenizer.chat_template" in self._llama.metadata

    def answer(self, messages: Sequence[Turn], write: Write) -> tuple[str, int]:
        """Generate; llama.cpp itself keeps what it knows of earlier turns."""
        until = Until(write, None if self.has_template else STOP)
        given = {"max_tokens": self._options.max_tokens, "temperature": self._options.temperature, "stream": True}
        count = 0
        try:
            if self.has_template:
                pieces = self._llama.create_chat_completion(list(messages), **given)
            else:
                pieces = self._llama.create_completion(plain_prompt(messages), stop=[STOP], **given)
            for piece in pieces:
                choice = piece["choices"][0]
                text = choice["delta"].get("content") if self.has_template else choice["text"]
                if text:
                    count += 1
                    until(text)
        except (ValueError, TemplateError) as error:
            if "context window" in str(error):
                raise UsageError(f"{error}: begin a new conversation (/reset).") from error
            raise InvalidInputError(f"The chat template cannot write the conversation: {error}.") from error
        until.finish()
        return until.text, count
