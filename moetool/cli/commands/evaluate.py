"""Command line of `moetool eval`: evaluates models on texts or tasks and prints tables."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moetool.checkpoint.files import write_json
from moetool.checkpoint.manifest import manifest_of, noted_in
from moetool.checkpoint.reader import Checkpoint
from moetool.cli import next_step
from moetool.cli.display import AsJson, LogJson, print_json, versioned, watched
from moetool.cli.evaluations import print_evaluation, print_evaluations
from moetool.cli.generate import build_options, builder, parameters_of
from moetool.errors import ResourceError, UsageError, option_of
from moetool.job.checks import output_directory, output_file
from moetool.job.result import Json, Printed
from moetool.measure.perplexity import EvaluationOptions
from moetool.measure.results import Evaluation
from moetool.measure.tasks.evaluating import evaluate
from moetool.measure.tasks.options import TaskOptions
from moetool.measure.tasks.results import Evaluated, Evaluations, place_beside
from moetool.report.recorded import is_same_measurement, saved_evaluations

_SHARED = EvaluationOptions.model_fields.keys() & TaskOptions.model_fields.keys()
_OF_TEXT = [parameter for parameter in parameters_of(EvaluationOptions) if parameter.name not in _SHARED]


@builder(TaskOptions, *_OF_TEXT)
def build(
    model: Annotated[list[str], typer.Argument(help="Checkpoints, compressed or not.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="Write the results to FILE.json, not to NAME.eval.json beside the checkpoint."),
    ] = None,
    json: AsJson = False,
    log_json: LogJson = None,
    **typed: object,
) -> None:
    """Run `moetool eval` on one model or several."""
    text, tasks = asked_for(typed)
    if twice := [name for name in model if model.count(name) > 1]:
        raise UsageError(f"{twice[0]} is named twice: leave one out.")
    file = None if output is None else new_file(output)
    if file is None and tasks is not None:
        for each in model:
            output_file(place_beside(each))
    options: dict[str, Json] = {}
    for asked in (text, tasks):
        options |= {} if asked is None else asked.model_dump(mode="json")
    with watched(log_json, "eval", model, options) as (display, ended):

        def seen(found: Evaluated) -> Evaluated:
            """Hours of tasks are on the disk before the next model begins, and a loss is where `report` finds it."""
            if file is not None or (found.tasks is None and not _is_for_report(found, text)):
                return found
            place = place_beside(found.model)
            try:
                _write(place, Evaluations(models=[found]))
            except ResourceError as error:
                display.log(f"The result was not saved. {error}")
                return found
            display.log(f"Saved to {place}.")
            return replace(found, saved=str(place))

        every = evaluate(model, text, tasks, display, seen)
        alone = every.models[0].text if tasks is None and len(model) == 1 else None
        result = every if alone is None else alone
        if file is not None:
            _write(file, result)
        ended(result)
    if json:
        print_json(result.to_json())
        return
    if isinstance(result, Evaluations):
        print_evaluations(result)
    else:
        print_evaluation(result)
    is_for_report = every.models[0].saved is not None
    if isinstance(result, Evaluation) and result.protocol == "perplexity" and not is_for_report:
        next_step.tell(next_step.line("generate", model[0], next_step.PROMPT))
    else:
        next_step.tell(next_step.line("report", model[0]))


def _is_for_report(found: Evaluated, options: EvaluationOptions | None) -> bool:
    """Whether `report` is to show a loss: of a model that moetool made, as it was made (`--keep` makes it another), and
    not saved yet."""
    text, checkpoint = found.text, Checkpoint.open(found.model)
    if text is None or options is None or options.keep is not None or manifest_of(noted_in(checkpoint)) is None:
        return False
    saved, _ = saved_evaluations(checkpoint)
    return all(not is_same_measurement(one, text) for one in saved)


def asked_for(typed: Mapping[str, object]) -> tuple[EvaluationOptions | None, TaskOptions | None]:
    """Split the options into those of a text and those of tasks.

    Raises:
        UsageError: an option belongs to one of the two that was not asked for.
    """
    said = {name: value for name, value in typed.items() if value is not None and value != []}
    shared = {name: said[name] for name in said.keys() & _SHARED}
    of_text = {name: said[name] for name in said.keys() & EvaluationOptions.model_fields.keys() - _SHARED}
    of_tasks = {name: said[name] for name in said.keys() - EvaluationOptions.model_fields.keys()}
    if of_tasks and "tasks" not in of_tasks:
        raise UsageError(f"{option_of(next(iter(of_tasks)))} is of tasks: say which (--tasks).")
    if of_tasks and of_text and "data" not in of_text:
        raise UsageError(f"{option_of(next(iter(of_text)))} is of a text: say which (--data), or leave it out.")
    text = build_options(EvaluationOptions, shared | of_text) if of_text or not of_tasks else None
    return text, build_options(TaskOptions, shared | of_tasks) if of_tasks else None


def new_file(path: Path) -> Path:
    """Return the path of the results. Raises `UsageError` if there is a file already; else as `output_file`."""
    if output_directory(path).exists():
        raise UsageError(f"--output {path} is there already. Choose another name, or delete it.")
    return output_file(path)


def _write(file: Path, result: Printed) -> None:
    write_json(file, versioned(result.to_json()))
