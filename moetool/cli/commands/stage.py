"""Command lines of all stages, such as `compress` and `upcycle`, which turn one checkpoint into another."""

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.names import CONFIG
from moetool.checkpoint.reader import read_config
from moetool.cli import next_step
from moetool.cli.choosing import CHOICES, chosen, in_order, summary_of
from moetool.cli.command import HintingCommand
from moetool.cli.display import Display, print_json
from moetool.cli.events import LOG_HELP, EventLog, logged, started
from moetool.cli.generate import build_options, make_command
from moetool.cli.jobs import print_plan, print_result
from moetool.cli.presets import explaining, preset_options
from moetool.errors import UsageError
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.processes import is_first_process
from moetool.job.result import Json, Result
from moetool.job.stage import AnyStage

_REPAIR_HELP = (
    "Afterwards train the result for N steps to predict what INPUT predicts, at the same size (see `moetool repair`)."
)
_PRESET_HELP = "Take options from a preset: a name of `moetool list presets`, FILE.yaml or FILE.yaml:VARIANT."
_SAME_INPUT_HELP = "With --resume: you vouch that input files that were written again since are the same."


_job_option = partial(typer.Option, rich_help_panel="Job")
_REPAIR = inspect.Parameter(
    "repair",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[int | None, typer.Option("--repair", min=1, help=_REPAIR_HELP, show_default=False)],
)


def build(name: str, arguments: list[str]) -> HintingCommand:
    """The command for one stage; `compress --method X` takes the options of X."""
    from moetool.stages import stages

    words = tuple(arguments)  # the parser empties the list
    more: list[inspect.Parameter] = []
    own = name
    methods = [stage for stage, kind in stages().items() if kind.method_of == name]
    if methods:
        methods = in_order(name, methods)
        choice, default = CHOICES[name]
        own = chosen(name, words, methods)
        option = typer.Option(help=f"One of: {', '.join(methods)}. [default: {default}]", show_default=False)
        more.append(
            inspect.Parameter(choice, inspect.Parameter.KEYWORD_ONLY, default=own, annotation=Annotated[str, option])
        )
    stage = stages()[own]
    if repairs := name in ("compress", "moefy"):
        more.append(_REPAIR)

    def command(
        input: Annotated[
            str, typer.Argument(help="A checkpoint: a directory, a .gguf file or a hub id.", show_default=False)
        ],
        output: Annotated[Path, typer.Argument(help="Where to write; new or empty.", show_default=False)],
        preset: Annotated[str | None, _job_option(help=_PRESET_HELP)] = None,
        dry_run: Annotated[
            bool, _job_option("--dry-run", help="Only print what size, memory and time it takes.")
        ] = False,
        resume: Annotated[bool, _job_option("--resume", help="Continue an interrupted run.")] = False,
        same_input: Annotated[bool, _job_option("--same-input", help=_SAME_INPUT_HELP)] = False,
        overwrite: Annotated[bool, _job_option("--overwrite", help="Delete an earlier result.")] = False,
        json: Annotated[bool, _job_option("--json", help="Print the result as one JSON object.")] = False,
        log_json: Annotated[Path | None, _job_option("--log-json", help=LOG_HELP)] = None,
        **typed: object,
    ) -> None:
        from moetool.job.estimate import estimate
        from moetool.job.ranks import telling

        if dry_run and not is_first_process():
            return
        if methods:
            typed.pop(choice)
        repair = typed.pop("repair") if repairs else None
        with nullcontext() if dry_run else telling(has_trainer=stage.has_trainer):
            if same_input and not resume:
                raise UsageError("--same-input vouches for the input of a run that is gone on with: add --resume.")
            given = preset_options(preset, name, own if methods else None)
            options = build_options(stage.options_type, typed, given)
            is_logged = not dry_run and is_first_process()
            events = EventLog(log_json, output, Path(input)) if log_json is not None and is_logged else None
        plan_checked, plan_job, run = _jobs(stage, input, options, repair)
        if dry_run:
            plan, in_bf16 = plan_checked(output, resume=resume, overwrite=overwrite)
            told = estimate(plan, options, output)
            if json:
                print_json({**plan.to_json(), **told.to_json()})
            else:
                quicker = None if in_bf16 is None else (estimate(in_bf16, options, output), stage.bfloat16_option)
                print_plan(plan.to_json(), told, quicker)
            if (problem := plan.shortage(output, memory=options.memory, disk=options.disk)) is not None:
                print(f"note: it would be refused here and now. {problem}", file=sys.stderr)
            elif not json:
                next_step.tell(next_step.without_dry_run(name, words))
            return
        if not is_first_process():
            run(output, resume=resume, overwrite=overwrite, same_input=same_input)
            return
        with logged(events) as ended:
            if events is not None:
                with telling(has_trainer=stage.has_trainer):
                    plan = plan_job()
                job: dict[str, Json] = {"command": name, "stage": own, "input": input, "output": str(output)}
                started(events, {**job, "resume": resume}, options.model_dump(mode="json"), plan=plan.to_json())
            progress = Display(events)
            result = run(output, resume=resume, overwrite=overwrite, progress=progress, same_input=same_input)
            ended(result)
        if json:
            print_json(result.to_json())
            return
        print_result(result)
        next_step.tell(next_step.after_stage(name, result, options, trains=not _is_encoder(result.output)))

    form = own if methods else ""
    summary = summary_of(name, words, own, stage.summary) if methods else None
    run = explaining(command)
    return make_command(name, run, stage.options_type, *more, form=form, summary=summary)


def _jobs(
    stage: type[AnyStage], source: str, options: RunOptions, repair: object
) -> tuple[Callable[..., tuple[Plan, Plan | None]], Callable[[], Plan], Callable[..., Result]]:
    """The functions that plan a job with its checks, plan it and run it: of the stage alone, or with so many steps of
    `repair` after it."""
    if isinstance(repair, int):
        from moetool.repair.chain import Repaired

        repaired = Repaired(stage, source, options, repair)
        return repaired.dry_run, repaired.plan, repaired.run
    from moetool.job.execute import run_stage
    from moetool.job.planning import dry_run, plan_stage

    return (
        partial(dry_run, stage, source, options=options),
        partial(plan_stage, stage, source, options),
        partial(run_stage, stage, source, options=options),
    )


def _is_encoder(output: str) -> bool:
    path = Path(output)
    return (path / CONFIG).is_file() and is_encoder(read_config(path)[1])
