"""Command line of `moetool chat`: a conversation with a model in the terminal."""

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from moetool.cli import next_step
from moetool.cli.display import Display
from moetool.cli.generate import build_options, builder
from moetool.cli.streams import standard_input, write_out
from moetool.errors import MoetoolError
from moetool.talk.checkpoint import CheckpointTalker
from moetool.talk.conversation import Answer, Conversation, Talker
from moetool.talk.gguf import GgufTalker
from moetool.talk.options import ChatOptions, check_options, gguf_file

_EXIT, _RESET = "/exit", "/reset"
_COMMANDS = f"{_RESET} begins a new conversation, {_EXIT} ends; Ctrl-C breaks an answer off."


@builder(ChatOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint of any kind, or a .gguf file.", show_default=False)],
    **typed: object,
) -> None:
    """Run `moetool chat`: answer every line of the input until it ends."""
    options, display = build_options(ChatOptions, typed), Display()
    talker = _load(model, options, display)
    conversation, lines = Conversation(talker, options.system), standard_input()
    is_terminal = lines.isatty()
    if is_terminal:
        display.log(_COMMANDS)
    answers: list[Answer] = []
    for text in _typed() if is_terminal else map(str.strip, lines):
        if text == _EXIT:
            break
        if text == _RESET:
            conversation.reset()
        elif is_terminal and re.fullmatch(r"/[a-z?]*", text):
            display.log(_COMMANDS)
        elif text:
            try:
                answers.append(conversation.say(text, write_out))
            except (MoetoolError, KeyboardInterrupt) as error:
                if not is_terminal:
                    raise
                display.log(f"error: {error}" if isinstance(error, MoetoolError) else "\nbroken off")
            print(flush=True)
    if answers:
        tokens, seconds = sum(own.tokens for own in answers), sum(own.seconds for own in answers)
        display.log(
            f"{len(answers)} answer{'s' * (len(answers) > 1)}, {tokens} tokens, {tokens / seconds:.1f} per second."
        )
    next_step.tell(next_step.line("serve", model))


def _load(model: str, options: ChatOptions, display: Display) -> Talker:
    file = gguf_file(model)
    check_options(model, file, options)
    talker: Talker = CheckpointTalker(model, options, display) if file is None else GgufTalker(file, options)
    if not talker.has_template:
        display.log(f"{model} has no chat template: turns are given as text after 'User:' and 'Assistant:'.")
    return talker


def _typed() -> Iterator[str]:
    """Lines from a terminal, until it ends (Ctrl-D)."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then has a history and can be edited

    with contextlib.suppress(EOFError):
        while True:
            yield input("> ").strip()
