"""`moetool generate`."""

import sys
from typing import Annotated

import typer

from moetool.cli import next_step
from moetool.cli.app import COMMANDS
from moetool.cli.display import AsJson, Display, print_json
from moetool.cli.generate import HintingCommand, build_options, make_command, with_options
from moetool.measure.generation import GenerationOptions, generate


def build(name: str, arguments: list[str]) -> HintingCommand:
    """The command."""

    def command(
        model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
        prompt: Annotated[str, typer.Argument(help="What to go on after; - reads it from stdin.", show_default=False)],
        json: AsJson = False,
        **typed: object,
    ) -> None:
        text = sys.stdin.read() if prompt == "-" else prompt
        display = Display()
        result = generate(model, text, build_options(GenerationOptions, typed), display, None if json else _write)
        if json:
            print_json(result.to_json())
            return
        print()
        display.log(f"{result.new_tokens} tokens, {result.tokens_per_second:.1f} per second.")
        next_step.tell(next_step.line("bench", model))

    return make_command(name, with_options(command, GenerationOptions), COMMANDS[name][1])


def _write(text: str) -> None:
    print(text, end="", flush=True)
