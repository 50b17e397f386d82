"""Training experts, side by side: dense fine-tuning, vanilla upcycling, DeRS, PESC and SIMoE on the same tokens.

    python scripts/benchmarks/tune.py MODEL TRAIN.txt TEST.txt OTHER.txt [--steps 60] [--seeds 3] [--output FILE.md]

MODEL is dense. Every method begins with the model's own function, trains on TRAIN for the same steps and tokens with
the best of three learning rates (by TEST, on the first seed), and is measured on TEST, and for what it forgot on OTHER.
Every command runs in a process of its own; memory is what it says of its peak, libraries included; tokens per second
are those of the training loop, on one thread.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATES = (3e-4, 1e-3, 3e-3)
LENGTH, BATCH = 128, 8
EXPERTS = ("--experts", "8")


@dataclass(frozen=True)
class Method:
    """How a model is upcycled and tuned."""

    name: str
    upcycle: tuple[str, ...] | None
    tune: tuple[str, ...] = ()


METHODS = (
    Method("dense fine-tuning", None),
    Method("vanilla upcycling", (*EXPERTS, "--method", "vanilla")),
    Method("DeRS-SM, p = .9999", (*EXPERTS, "--method", "ders-sparse")),
    Method("DeRS-LM, r = 1", (*EXPERTS, "--method", "ders-lowrank")),
    Method("PESC, width 64, LoRA 16", (*EXPERTS, "--method", "pesc", "--width", "64"), ("--lora-rank", "16")),
    Method("SIMoE, τ = .75", (*EXPERTS, "--method", "simoe")),
)


def run(*arguments: object) -> dict[str, Any]:
    """What a command of moetool says, in a process and on a thread of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moetool", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, env=environment, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def trained(method: Method, rate: float, seed: int, options: argparse.Namespace, work: Path) -> dict[str, float]:
    """One model: its perplexities, sizes, memory and speed."""
    source, output, added = options.model, work / "tuned", 0
    shutil.rmtree(output, ignore_errors=True)
    if method.upcycle is not None:
        source = work / "upcycled"
        shutil.rmtree(source, ignore_errors=True)
        run("upcycle", options.model, source, *method.upcycle, "--seed", seed, "--calibration", options.train)
    told = run(
        *("tune", source, output, "--data", options.train, "--sequence-length", LENGTH, "--batch-size", BATCH),
        *("--steps", options.steps, "--learning-rate", rate, "--seed", seed, "--save-every", 10**6, *method.tune),
    )
    if method.upcycle is not None:
        added = run("inspect", output)["parameters"]["stored"] - options.parameters
    return {
        "test": perplexity(output, options.test, options.windows),
        "other": perplexity(output, options.other, options.windows),
        "added": added,
        "bytes": told["bytes_after"],
        "trained": told["trained_parameters"],
        "memory": told["peak_memory_bytes"],
        "speed": options.steps * LENGTH * BATCH / told["training_seconds"],
    }


def perplexity(model: object, text: str, windows: int) -> float:
    """On the first windows of a text."""
    found = run("eval", model, "--data", text, "--sequence-length", LENGTH, "--windows", windows)["perplexity"]
    return float(found)


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "train", "test", "other"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from moetool.checkpoint.reader import Checkpoint
    from moetool.conversion.dense import DenseModel

    options.parameters = DenseModel(Checkpoint.open(options.model)).parameters
    before = [perplexity(options.model, text, options.windows) for text in (options.test, options.other)]
    lines = [
        f"{options.steps} steps of {BATCH} x {LENGTH} tokens, {options.seeds} seeds, {options.windows} windows of "
        f"{LENGTH} tokens to test on. Before: {before[0]:.2f} on the test text, {before[1]:.2f} on the other.",
        "",
        "| method | learning rate | perplexity | on the other text | added parameters | trained | bytes | "
        "peak memory | of dense | tokens/s | of dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    dense: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for method in METHODS:
            tried = {rate: trained(method, rate, 0, options, work) for rate in RATES}
            rate = min(tried, key=lambda rate: tried[rate]["test"])
            runs = [tried[rate], *(trained(method, rate, seed, options, work) for seed in range(1, options.seeds))]
            mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
            dense = dense or mean
            lines.append(
                f"| {method.name} | {rate:g} | {spread([run['test'] for run in runs])} | "
                f"{spread([run['other'] for run in runs])} | {mean['added']:,.0f} | {mean['trained']:,.0f} | "
                f"{mean['bytes'] / 1e6:.1f} MB | {mean['memory'] / 1e9:.2f} GB | "
                f"{mean['memory'] / dense['memory']:.2f} | "
                f"{mean['speed']:.0f} | {mean['speed'] / dense['speed']:.2f} |"
            )
            print(lines[-1], flush=True)
    if options.output is not None:
        options.output.write_text("\n".join(["# Training experts on the same tokens", "", *lines, ""]))


if __name__ == "__main__":
    main()
