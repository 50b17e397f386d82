"""`moetool demo`."""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool import demo
from moetool.cli.app import COMMANDS
from moetool.cli.display import Display, print_json, print_table
from moetool.cli.generate import make_command
from moetool.errors import UsageError
from moetool.evaluation.perplexity import EvaluationOptions, perplexity
from moetool.pipeline.execute import run_stage
from moetool.pipeline.sizes import format_bytes
from moetool.pipeline.stages import stages

# Method, ratio, and options that this model needs: its experts are 352 wide, which groups of 128 do not divide.
COMPRESSIONS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("d2moe", 0.2, {}),
    ("d2moe", 0.4, {}),
    ("d2moe", 0.6, {}),
    ("hybrid", 0.75, {"group_size": 32}),
)
_MARKER = ".moetool-demo"


def build(name: str, arguments: list[str]) -> Any:
    """The command."""

    def command(
        output: Annotated[Path, typer.Argument(help="Where to write the models.")] = Path("demo"),
        steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = demo.STEPS,
        seed: Annotated[int, typer.Option(min=0, help="Seed of everything.")] = 0,
        json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    ) -> None:
        began = time.monotonic()
        rows = run(output, steps, seed, Display())
        if json:
            print_json({"models": rows, "seconds": round(time.monotonic() - began, 1)})
            return
        print_table(
            ("model", "size", "smaller by", "held-out perplexity", "loss"),
            [
                (row["model"], format_bytes(row["bytes"]), f"{row['ratio']:.1%}", f"{row['perplexity']:.3f}", loss(row))
                for row in rows
            ],
        )
        print(f"All of it in {time.monotonic() - began:.0f} s. The models are in {output}; try:")
        print(f"  moetool inspect {output}/hybrid-75")

    def loss(row: dict[str, Any]) -> str:
        return "-" if row["excess"] == 0 else f"{row['excess']:+.4f} nats"

    return make_command(name, command, COMMANDS[name][1])


def run(output: Path, steps: int, seed: int, display: Display) -> list[dict[str, Any]]:
    """Train, compress at every ratio, evaluate; one row per model."""
    if output.exists() and any(output.iterdir()):
        if not (output / _MARKER).exists():
            raise UsageError(f"{output} is not empty and not an earlier demo. Choose another place.")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).touch()
    display.log("Training a small Mixtral (8 experts, top-2) on Python's own documentation.")
    model, train_text, held_out = demo.make_model(output, steps, seed, display)
    evaluation = EvaluationOptions(data=str(held_out), sequence_length=demo.LENGTH)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    original = perplexity(str(model), evaluation, display)
    rows = [{"model": "mixtral", "bytes": size, "ratio": 0.0, "perplexity": original["perplexity"], "excess": 0.0}]
    for method, ratio, more in COMPRESSIONS:
        display.log(f"Compressing by {ratio:.0%} with --method {method}.")
        target = output / f"{method}-{ratio * 100:.0f}"
        options = stages()[method].options_type.model_validate(
            {
                "ratio": ratio,
                "calibration": str(train_text),
                "samples": 64,
                "sequence_length": demo.LENGTH,
                "seed": seed,
                **more,
            }
        )
        result = run_stage(method, model, target, options, progress=display)
        score = perplexity(str(target), evaluation, display)
        rows.append(
            {
                "model": f"{method} {ratio:.0%}",
                "bytes": result["bytes_after"],
                "ratio": result["achieved_ratio"],
                "perplexity": score["perplexity"],
                "excess": score["nll"] - original["nll"],
            }
        )
    return rows
