"""Command line of `moetool generate`: prints what a model writes after a prompt."""

from typing import Annotated

import typer

from moetool.cli import next_step
from moetool.cli.display import AsJson, Display, print_json
from moetool.cli.generate import build_options, builder
from moetool.cli.streams import standard_input, write_out
from moetool.measure.generation import GenerationOptions, generate


@builder(GenerationOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="What to go on after; - reads it from stdin.", show_default=False)],
    json: AsJson = False,
    **typed: object,
) -> None:
    """Run `moetool generate`, with the prompt from the command line or from stdin."""
    text = standard_input().read() if prompt == "-" else prompt
    display = Display()
    result = generate(model, text, build_options(GenerationOptions, typed), display, None if json else write_out)
    if json:
        print_json(result.to_json())
        return
    print(flush=True)  # before what follows on stderr
    display.log(f"{result.new_tokens} tokens, {result.tokens_per_second:.1f} per second.")
    next_step.tell(next_step.line("bench", model))
