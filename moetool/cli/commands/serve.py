"""Command line of `moetool serve`: a model behind an HTTP server."""

import contextlib
import json as json_text
import shlex
from typing import Annotated

import typer

from moetool.cli import next_step
from moetool.cli.display import Display
from moetool.cli.generate import build_options, builder
from moetool.talk.options import ServeOptions, check_options, gguf_file
from moetool.talk.server import Server


@builder(ServeOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint of any kind, or a .gguf file.", show_default=False)],
    **typed: object,
) -> None:
    """Run `moetool serve`: answer HTTP requests until the process is interrupted."""
    options, file, display = build_options(ServeOptions, typed), gguf_file(model), Display()
    check_options(model, file, options)
    server = Server(model, file, options, display)

    def tell() -> None:
        display.log(f"{model} is served at http://{server.address}/v1 until Ctrl-C.")
        body = json_text.dumps({"model": model, "prompt": next_step.PROMPT, "max_tokens": 20})
        url = f"http://{server.address}/v1/completions"
        next_step.tell(shlex.join(["curl", url, "-H", "Content-Type: application/json", "-d", body]))

    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # how a server is asked to end
        server.run(tell)
