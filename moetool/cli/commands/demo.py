"""Command line of `moetool demo`: trains, upcycles, compresses and evaluates a small model."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from moetool import demo
from moetool.checkpoint.sizes import format_bytes
from moetool.cli.display import AsJson, Display, print_json, print_table
from moetool.cli.generate import builder
from moetool.cli.next_step import try_next
from moetool.compiled import compiler
from moetool.convert.results import ConversionResult
from moetool.errors import InterruptedRunError, UsageError
from moetool.job.checks import output_directory
from moetool.job.execute import run_stage
from moetool.job.lock import Lock
from moetool.job.result import Result
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.stages import stages

# Method, ratio, and options that this model needs: its experts are 352 wide, which groups of 128 do not divide.
COMPRESSIONS: tuple[tuple[str, float, dict[str, object]], ...] = (
    ("d2moe", 0.5, {}),
    ("hybrid", 0.75, {"group_size": 32}),
)
_MARKER = ".moetool-demo"


class _Bars(Display):
    """Progress without the messages of each command, which are about models larger than the demo's."""

    def log(self, message: str) -> None:
        """Show nothing of the messages that the demo's commands log."""


@builder()
def build(
    output: Annotated[Path, typer.Argument(help="Where to write the models.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = demo.STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything.")] = 0,
    json: AsJson = False,
) -> None:
    """Run `moetool demo` in a directory and print its table."""
    began = time.monotonic()
    rows = run(output_directory(output), steps, seed, Display())
    if json:
        print_json(demo.DemoResult(rows, round(time.monotonic() - began, 1)).to_json())
        return
    print_table(
        ("model", "size", "held-out perplexity", "what was done"),
        [(row.model, format_bytes(row.bytes), f"{row.perplexity:.2f}", row.description) for row in rows],
        numbers=False,
    )
    print("The held-out text is of the kind that was trained and calibrated on; other text loses more to compression.")
    print(f"All of it in {time.monotonic() - began:.0f} s. The models are in {output}; try:")
    for line in try_next(f"inspect {output}/hybrid-75"):
        print(f"  {line}")


def run(output: Path, steps: int, seed: int, display: Display) -> list[demo.DemoModel]:
    """Train a dense model, upcycle it, fine-tune both, compress the MoE model; one row per model."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} exists and is not a directory. Choose another place.")
    marker = output / _MARKER
    if output.exists() and any(output.iterdir()) and not marker.exists():
        raise UsageError(f"{output} is not empty and not an earlier demo. Choose another place.")
    with Lock(marker, output), _from_the_start(output):
        for path in output.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != marker:
                path.unlink()
        return _run(output, steps, seed, display)


@contextmanager
def _from_the_start(output: Path) -> Iterator[None]:
    """Whatever stops the demo: its models are made in two minutes, and the next demo there deletes them."""
    try:
        yield
    except (InterruptedRunError, KeyboardInterrupt) as error:
        raise type(error)(f"Stopped. The same command starts over in {output}.") from error


def _run(output: Path, steps: int, seed: int, display: Display) -> list[demo.DemoModel]:
    display.log("Training a small Llama on Python's own documentation.")
    threading.Thread(target=compiler.problem, daemon=True).start()  # the kernels that the compressed models run on
    bars = _Bars()
    dense, train_text, held_out = demo.make_dense(output, steps, seed, bars)
    evaluation = EvaluationOptions(data=str(held_out), sequence_length=demo.LENGTH)
    text = {"calibration": str(train_text), "mix": 0.0, "sequence_length": demo.LENGTH, "seed": seed}
    rows: list[demo.DemoModel] = []

    def add(path: Path, description: str) -> None:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        score = perplexity(str(path), evaluation)
        rows.append(demo.DemoModel(path.name, size, score.perplexity, description))

    def stage(name: str, source: Path, target: Path, **more: object) -> Result:
        options = stages()[name].options_type.model_validate({**text, **more})
        return run_stage(stages()[name], source, target, options, progress=bars, goes_on=True)

    add(dense, "trained from nothing")
    display.log("Upcycling it: 8 experts, 2 per token, no change in what it computes.")
    upcycled = output / "upcycled"
    told = stage("vanilla", dense, upcycled, center_router=True).details
    assert isinstance(told, ConversionResult)
    assert told.proof is not None
    add(upcycled, f"upcycled, 8 experts: logits differ by {told.proof.relative_logit_error:.0e}")
    more = max(1, steps * 3 // 10)
    display.log(f"Fine-tuning both for {more} steps.")
    demo.tune(dense, output / "dense-tuned", train_text, more, seed, bars)
    add(output / "dense-tuned", f"the dense model after {more} more steps")
    tuned = output / "mixture"
    demo.tune(upcycled, tuned, train_text, more, seed, bars)
    add(tuned, f"the upcycled model after {more} more steps")
    for method, ratio, own in COMPRESSIONS:
        display.log(f"Compressing it by {ratio:.0%} with --method {method}.")
        target = output / f"{method}-{ratio * 100:.0f}"
        sizes = stage(method, tuned, target, ratio=ratio, samples=32, **own).sizes
        assert sizes is not None
        add(target, f"that one, {sizes.achieved_ratio:.1%} smaller")
    return rows
