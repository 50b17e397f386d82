"""Command line of `moetool verify`: checks a checkpoint's files, and its likeness to its source."""

from dataclasses import replace
from typing import Annotated

import typer

from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.missing import is_base
from moetool.checkpoint.sizes import format_bytes
from moetool.checkpoint.source import local_path
from moetool.cli import next_step
from moetool.cli.display import AsJson, LogJson, print_fields, print_json, print_table, watched
from moetool.cli.evaluations import over_texts, print_texts, same_tokens
from moetool.cli.generate import build_options, builder
from moetool.errors import UsageError
from moetool.measure.likeness import LikenessOptions, measure_likeness
from moetool.measure.results import NAT_UNIT, Comparison, Likeness, shown_excess
from moetool.measure.verification import exported_gguf, verify_checkpoint
from moetool.stages import stages

_LARGE = 0.8  # relative error of a matrix, at which readers begin to wonder
_EDITED_HELP = "The model card, licence and other documents were edited since: note it, and go on."


@builder(LikenessOptions)
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint.", show_default=False)],
    against: Annotated[str | None, typer.Option(help="The checkpoint it was made from.")] = None,
    edited_documents: Annotated[bool, typer.Option("--edited-documents", help=_EDITED_HELP)] = False,
    json: AsJson = False,
    log_json: LogJson = None,
    **typed: object,
) -> None:
    """Run `moetool verify` on a checkpoint."""
    options = build_options(LikenessOptions, typed)
    if options.text is not None and against is None:
        raise UsageError("--text compares with a source: give --against, too.")
    if options.text is None and options.has_limits:
        raise UsageError("--max-kl, --min-top1 and --max-layer-error need a text: give --text.")
    models = [model, *([] if against is None else [against])]
    with watched(log_json, "verify", models, options.model_dump(mode="json")) as (progress, ended):
        result = verify_checkpoint(model, against, progress, edited=edited_documents, known=stages())
        if options.text is not None and against is not None:
            result = replace(result, likeness=measure_likeness(model, against, options, progress))
        ended(result)
    if json:
        print_json(result.to_json())
        return
    comparison = result.comparison
    fields = [("model", model), ("tensors", f"{result.tensors:,}, all finite, {format_bytes(result.bytes)}")]
    if comparison is not None:
        fields.append(("against", f"{comparison.against}: {_compared(comparison)}"))
    if (likeness := result.likeness) is not None:
        fields += _likeness(likeness)
    fields += [("note", note) for note in result.notes]
    print_fields(fields)
    if comparison is not None and (errors := comparison.relative_error) is not None:
        rows = [(str(layer), *(f"{error:.3g}" for error in roles.values())) for layer, roles in errors.items()]
        print("Relative error of the stored experts, ‖W' − W‖ / ‖W‖:")
        print_table(("layer", *next(iter(errors.values()))), rows)
        if likeness is None and max(error for roles in errors.values() for error in roles.values()) > _LARGE:
            print("Errors near 1 may do no harm: codes are chosen for a text's inputs. --text FILE measures outputs.")
    if likeness is not None and likeness.layer_error is not None:
        rows = [(str(layer), f"{error:.3g}") for layer, error in likeness.layer_error.items()]
        print("Relative output error of each layer, given the source's input:")
        print_table(("layer", "error"), rows)
    if likeness is not None:
        print_texts(likeness.texts)
    print("ok")
    if is_base(local_path(model)):
        of, made = against or read_manifest(local_path(model)).source, next_step.here(model, "decomposed")
        next_step.tell(next_step.line("decompose", of, made, "--base", model))
    elif (file := exported_gguf(model)) is None:
        next_step.tell(next_step.line("report", model, *(("--against", against) if against else ())))
    elif (then := next_step.after_gguf(file.parent)) is not None:
        next_step.tell(then)


def _likeness(found: Likeness) -> list[tuple[str, str]]:
    return [
        ("text", f"{found.text} ({found.windows} windows, {found.tokens:,} tokens)"),
        ("excess loss", f"{shown_excess(found.excess, None)} {NAT_UNIT}"),
        *same_tokens(found),
        *over_texts(found.over_texts),
    ]


def _compared(comparison: Comparison) -> str:
    told = []
    if comparison.same_tensors:
        rounded = comparison.rounded_tensors
        rest = "everything" if not rounded else f"{rounded} matrices are in few bits, everything else"
        told.append(f"outside the experts {rest} is bit for bit the same")
    if comparison.stages:
        told.append(f"it was made from that by {', then '.join(reversed(comparison.stages))}")
    return "; ".join(told) or "the same family and shape"
