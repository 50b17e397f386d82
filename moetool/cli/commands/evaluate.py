"""`moetool eval`."""

from typing import Annotated

import typer

from moetool.cli import next_step
from moetool.cli.app import COMMANDS
from moetool.cli.display import Display, print_fields, print_json
from moetool.cli.generate import HintingCommand, build_options, make_command, with_options
from moetool.measure.evaluated import Divergence, Evaluation
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT


def build(name: str, arguments: list[str]) -> HintingCommand:
    """The command."""

    def command(
        model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
        json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
        **typed: object,
    ) -> None:
        result = perplexity(model, build_options(EvaluationOptions, typed), Display())
        if json:
            print_json(result.to_json())
            return
        tokens = f"{result.windows:,} windows of {result.sequence_length} tokens"
        if result.begin:
            tokens += f", each after {result.begin}"
        print_fields(
            [
                ("model", model),
                ("data", f"{result.data} ({tokens})"),
                (result.protocol, f"{result.perplexity:.4f}"),
                ("nll", f"{result.nll:.6f}"),
                *(_against(result.against) if result.against else ()),
                *_synthesis(result),
                *(_batches(result.batch_rows) if result.depends_on_batch else ()),
            ]
        )
        next_step.tell(
            next_step.line("generate", model, "PROMPT")
            if result.protocol == "perplexity"
            else next_step.line("verify", model)
        )

    return make_command(name, with_options(command, EvaluationOptions), COMMANDS[name][1])


def _against(found: Divergence) -> list[tuple[str, str]]:
    """How far it is from the original."""
    error = "" if found.excess_error is None else f" ± {found.excess_error:.6f}"
    return [
        ("against", f"{found.model} (perplexity {found.perplexity:.4f}, nll {found.nll:.6f})"),
        ("excess", f"{found.excess:.6f}{error} nats per token"),
        ("KL", f"{found.kl:.6f} nats per token"),
        ("top-1 agreement", f"{found.agreement:.2%}"),
    ]


def _synthesis(result: Evaluation) -> list[tuple[str, str]]:
    """How a compressed model's experts were made; nothing of any other model."""
    told = result.synthesis
    made = "dense when loaded" if result.synthesized == "load" else "as they run"
    return [("experts", f"made {made}: {told.reason}")] if told.needed_bytes else []


def _batches(rows: int) -> list[tuple[str, str]]:
    """What to know of a result that is one of this size of batches."""
    together = "one window" if rows == 1 else f"{rows} windows"
    return [
        ("batches", f"of {together} each; another --batch-tokens gives another result"),
        ("note", BATCH_DEPENDENT),
    ]
