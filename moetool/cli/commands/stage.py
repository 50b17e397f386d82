"""Commands that turn one checkpoint into another."""

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool.cli.app import COMMANDS
from moetool.cli.display import Display, print_fields, print_json
from moetool.cli.generate import (
    build_options,
    make_command,
    preset_recipe,
    read_recipe,
    recipe_method,
    with_options,
)
from moetool.errors import MoetoolError, UsageError, did_you_mean
from moetool.job.processes import is_first_process
from moetool.job.sizes import format_bytes, format_change

# Commands that are several stages, the option that chooses one, and the one that it is without it.
CHOICES = {
    "compress": ("method", "d2moe"),
    "upcycle": ("method", "vanilla"),
    "moefy": ("method", "g-moefication"),
    "export": ("format", "dense-experts"),
}


def build(name: str, arguments: list[str]) -> Any:
    """The command for one stage; `compress --method X` takes the options of X."""
    from moetool.stages import stages

    more: list[inspect.Parameter] = []
    chosen = name
    methods = [stage for stage, kind in stages().items() if kind.method_of == name]
    if methods:
        choice, default = CHOICES[name]
        chosen = _method(arguments, f"--{choice}", methods, default)
        if chosen not in methods:
            hint = did_you_mean(chosen, methods)
            print(f"error: --{choice} {chosen}: there is {', '.join(methods)}.{hint}", file=sys.stderr)
            raise typer.Exit(UsageError.exit_code)
        option = typer.Option(help=f"One of: {', '.join(methods)}.")
        more.append(
            inspect.Parameter(choice, inspect.Parameter.KEYWORD_ONLY, default=chosen, annotation=Annotated[str, option])
        )
    stage = stages()[chosen]

    def command(
        input: Annotated[str, typer.Argument(help="A checkpoint: a directory or a hub id.", show_default=False)],
        output: Annotated[Path, typer.Argument(help="Where to write; new or empty.", show_default=False)],
        recipe: Annotated[str | None, typer.Option(help="Options from FILE.yaml or FILE.yaml:VARIANT.")] = None,
        preset: Annotated[str | None, typer.Option(help="Options of a preset that comes along: d2moe-40 …")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will cost, and stop.")] = False,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier result.")] = False,
        json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
        **typed: Any,
    ) -> None:
        from moetool.stages import plan_stage, run_stage

        if methods:
            typed.pop(choice)
        given = read_recipe(preset_recipe(preset, recipe), name, chosen if methods else None)
        options = build_options(stage.options_type, typed, given)
        if dry_run:
            plan = plan_stage(chosen, input, options).to_json()
            if json:
                print_json(plan)
            else:
                _print_plan(plan)
            return
        progress = Display() if is_first_process() else None
        result = run_stage(chosen, input, output, options, resume=resume, overwrite=overwrite, progress=progress)
        if not is_first_process():
            return
        if json:
            print_json(result)
        else:
            _print_result(result)

    elsewhere: dict[str, list[str]] = {}
    for method in methods:
        for field in stages()[method].options_type.model_fields:
            elsewhere.setdefault("--" + field.replace("_", "-"), []).append(method)
    places = {option: f"--{CHOICES[name][0]} {' or '.join(those)}" for option, those in elsewhere.items()}
    return make_command(name, with_options(command, stage.options_type, *more), COMMANDS[name][1], places)


def _method(arguments: list[str], option: str, known: list[str], default: str) -> str:
    """What `--method` says, or the recipe; it decides which other options there are."""
    if (said := _value(arguments, option)) is not None:
        return said
    try:
        recipe = preset_recipe(_value(arguments, "--preset"), _value(arguments, "--recipe"))
        said = recipe_method(recipe)
    except MoetoolError:
        said = None  # the command itself says what is wrong with the recipe
    return said if said in known else default


def _value(arguments: list[str], option: str) -> str | None:
    """What an option says; the last time, as everywhere."""
    said = None
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            said = argument.removeprefix(f"{option}=")
        elif argument == option and position + 1 < len(arguments):
            said = arguments[position + 1]
    return said


def _print_plan(plan: dict[str, Any]) -> None:
    def show(name: str, value: Any) -> str:
        return format_bytes(value) if name.endswith("bytes") else f"{value:,}" if isinstance(value, int) else str(value)

    print_fields((name.removesuffix("_bytes").replace("_", " "), show(name, value)) for name, value in plan.items())
    print("Nothing was written (--dry-run).")


def _proof(proof: dict[str, Any] | None) -> list[tuple[str, str]]:
    if proof is None:
        return []
    verdict = "" if proof["preserves"] else " (the method changes the model)"
    fields = [
        ("logits", f"differ by {proof['relative_logit_error']:.1e} on {proof['tokens']} real tokens{verdict}"),
    ]
    if proof.get("with_all_experts"):
        fields[0] = ("logits", f"with all experts {fields[0][1]}")
    if "loss_kept" in proof:
        fields.append(("loss", f"{proof['loss_dense']:.4f} → {proof['loss_kept']:.4f} nats with the experts kept"))
    elif "loss_dense" in proof:
        fields.append(("loss", f"{proof['loss_dense']:.4f} → {proof['loss_mixture']:.4f} nats"))
    if "router_entropy" in proof:
        least, largest = proof["least_expert_share"], proof["largest_expert_share"]
        fields.append(("routing", f"{least:.1%} to {largest:.1%} per expert, {proof['router_entropy']:.2f} nats"))
    return fields


def _captured(activations: dict[str, float]) -> str:
    """How much of the activations' energy the experts chosen hold."""
    text = f"chosen ones hold {activations['captured']:.1%} of the energy"
    if "captured_by_oracle" in activations:
        text += f" (the best choice {activations['captured_by_oracle']:.1%}"
        text += f", of which {activations['selector_accuracy']:.1%} were chosen)"
    return text


def _print_result(result: dict[str, Any]) -> None:
    fields = [("output", str(result["output"]))]
    if "bytes_after" in result:
        before, after = format_bytes(result["bytes_before"]), format_bytes(result["bytes_after"])
        change = f" ({format_change(result['achieved_ratio'])})" if "achieved_ratio" in result else ""
        fields.append(("size", f"{before} → {after}{change}"))
    if "parameters" in result:
        total, active = result["parameters"]["total"], result["parameters"]["active"]
        if "target" in result:
            fields.append(("family", result["target"]))
        fields.append(("parameters", f"{total:,}, of which {active:,} per token"))
    fields += _proof(result.get("proof"))
    if "soft_sparsity" in result.get("activations", {}):
        near, centred = (result["activations"][key] for key in ("soft_sparsity", "soft_sparsity_centred"))
        fields.append(("activations", f"{near:.1%} near zero, {centred:.1%} near their mean"))
    if "captured" in result.get("activations", {}):
        fields.append(("experts", _captured(result["activations"])))
    fields += [("note", note) for note in result.get("notes", [])]
    if result.get("status") == "finished":
        print_fields([*fields, ("status", "finished already; nothing was done")])
        return
    fields.append(("time", f"{result['seconds']:.1f} s"))
    fields.append(("peak memory", format_bytes(result["peak_memory_bytes"])))
    print_fields(fields)
