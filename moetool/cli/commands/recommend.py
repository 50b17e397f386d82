"""Command line of `moetool recommend`: says which compression suits a memory and an engine."""

from typing import Annotated

import typer

from moetool.checkpoint.sizes import as_read_from, format_bytes, format_change
from moetool.cli import next_step
from moetool.cli.display import AsJson, print_fields, print_json
from moetool.cli.generate import build_options, builder
from moetool.compare.recommendation import Recommendation, RecommendOptions, recommend
from moetool.job.forecast import format_seconds
from moetool.runtime.memory import total_bytes


@builder(RecommendOptions)
def build(
    model: Annotated[str, typer.Argument(help="An MoE model: a directory (config.json is enough), or a hub id.")],
    json: AsJson = False,
    **typed: object,
) -> None:
    """Run `moetool recommend` on a model's headers, or on its config alone."""
    options = build_options(RecommendOptions, typed)
    result = recommend(model, options.memory or total_bytes(), options.engine)
    whose = "" if options.memory else " (this machine's)"
    if json:
        print_json(result.to_json())
        return
    _print(result, whose)
    if result.commands:
        next_step.tell(next_step.line(*result.commands[0], "--dry-run"))
    else:
        next_step.tell(next_step.line("generate", model, next_step.PROMPT))


def _print(result: Recommendation, whose: str) -> None:
    numbers = f"{result.parameters:,} parameters, {result.active_parameters:,} of them per token"
    fields = [
        ("model", f"{result.model}: {result.model_type}, {numbers}"),
        ("size", f"{format_bytes(result.bytes)}{as_read_from(result.gguf_bytes)}"),
        ("memory", f"{format_bytes(result.memory)}{whose}, of which {format_bytes(result.weights)} are for weights"),
    ]
    if result.ratio is None:
        print_fields([*fields, ("fits", "as it is")])
        return
    bits = f"{result.bits:.1f} per parameter: these bytes divided by all parameters; --dry-run tells the experts' alone"
    fields += [("to fit", f"{format_bytes(result.weights)} ({format_change(result.ratio)})"), ("bits", bits)]
    fields += [
        ("command" if number == 0 else "then", next_step.line(*own)) for number, own in enumerate(result.commands)
    ]
    if result.in_llama_cpp:
        fields.append(("for llama.cpp", next_step.line(*result.in_llama_cpp)))
    if result.seconds is not None:
        fields.append(("time needed", f"about {format_seconds(result.seconds)} on this machine"))
    if result.peak_memory_bytes is not None:
        fields.append(("memory needed", format_bytes(result.peak_memory_bytes)))
    print_fields([*fields, *(("note", note) for note in result.notes)])
