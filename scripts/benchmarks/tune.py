"""Training experts, side by side: dense fine-tuning, vanilla upcycling, DeRS, PESC and SIMoE on the same tokens.

    python scripts/benchmarks/tune.py MODEL TRAIN.txt TEST.txt OTHER.txt [--validation TEXT] [--output FILE.md]

MODEL is dense. Every method begins with the model's own function and trains on TRAIN for the same steps and tokens. Its
learning rate is the best of RATES on a validation text, on the first seed: from the middle of RATES on in the direction
in which it gets better, until it gets worse. With it every seed is measured on TEST, and for what it forgot on OTHER,
neither of which is looked at before. Without --validation that text is the last tenth of TRAIN, which is then not
trained on. Every command runs in a process and on a thread of its own; memory is what it says of its peak, libraries
included; CPU time is that of the whole `tune` command, which what else runs on the machine changes little.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import made_by, publish

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
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
    """What a command of moetool says, in a process and on a thread of its own, and its `cpu_seconds`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moetool", *map(str, arguments), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, env=environment, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **json.loads(done.stdout),
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def tuned(method: Method, rate: float, seed: int, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Make and train one model; what `tune` says."""
    source = options.model
    shutil.rmtree(output, ignore_errors=True)
    if method.upcycle is not None:
        source = output.with_name("upcycled")
        shutil.rmtree(source, ignore_errors=True)
        text = ("--calibration", options.train, "--mix", 0)
        run("upcycle", options.model, source, *method.upcycle, "--seed", seed, *text)
    return run(
        *("tune", source, output, "--data", options.train, "--sequence-length", LENGTH, "--batch-size", BATCH),
        *("--steps", options.steps, "--learning-rate", rate, "--seed", seed, "--save-every", 10**6, *method.tune),
    )


def measured(output: Path, told: dict[str, Any], method: Method, options: argparse.Namespace) -> dict[str, float]:
    """Perplexities, sizes, memory and time of one model."""
    stored = options.parameters
    if method.upcycle is not None:
        counts = run("inspect", output)["parameters"]
        stored = min(counts["stored"], counts["total"])  # neither placeholders nor experts that are not in the file
    return {
        "test": perplexity(output, options.test, options.windows),
        "other": perplexity(output, options.other, options.windows),
        "added": stored - options.parameters,
        "bytes": told["bytes_after"],
        "trained": told["trained_parameters"],
        "memory": told["peak_memory_bytes"],
        "cpu": told["cpu_seconds"],
    }


def perplexity(model: object, text: object, windows: int) -> float:
    """On the first windows of a text."""
    found = run("eval", model, "--data", text, "--sequence-length", LENGTH, "--windows", windows)["perplexity"]
    return float(found)


def best_rate(score: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The rate of the lowest score among RATES, if there is one valley, and all scores that it took to find it."""
    scores: dict[float, float] = {}

    def at(index: int) -> float:
        rate = RATES[index]
        return scores[rate] if rate in scores else scores.setdefault(rate, score(rate))

    here = len(RATES) // 2
    for step in (1, -1):
        while 0 <= here + step < len(RATES) and at(here + step) < at(here):
            here += step
    return RATES[here], dict(sorted(scores.items()))


def compared(method: Method, options: argparse.Namespace, work: Path) -> tuple[float, dict[float, float], list[Any]]:
    """The rate of a method, its scores by rate, and what was measured of every seed."""
    told: dict[float, dict[str, Any]] = {}

    def score(rate: float) -> float:
        told[rate] = tuned(method, rate, 0, options, work / f"{rate:g}")
        return perplexity(work / f"{rate:g}", options.validation, options.windows)

    rate, scores = best_rate(score)
    runs = [measured(work / f"{rate:g}", told[rate], method, options)]
    for tried in scores:
        shutil.rmtree(work / f"{tried:g}")
    for seed in range(1, options.seeds):
        again = tuned(method, rate, seed, options, work / "tuned")
        runs.append(measured(work / "tuned", again, method, options))
    return rate, scores, runs


def held_out(text: Path, work: Path) -> tuple[Path, Path]:
    """A text without its last tenth, and that tenth, cut at a line."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    total, seen, cut = sum(map(len, lines)), 0, 0
    while seen < 0.9 * total:
        seen, cut = seen + len(lines[cut]), cut + 1
    train, validation = work / "train.txt", work / "validation.txt"
    train.write_text("".join(lines[:cut]), encoding="utf-8")
    validation.write_text("".join(lines[cut:]), encoding="utf-8")
    return train, validation


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


def table(options: argparse.Namespace, work: Path) -> list[str]:
    """Everything that is published."""
    before = [
        perplexity(options.model, text, options.windows) for text in (options.validation, options.test, options.other)
    ]
    lines = [
        f"{options.steps} steps of {BATCH} x {LENGTH} tokens, {options.seeds} seeds, {options.windows} windows of "
        f"{LENGTH} tokens to measure on. Before: {before[0]:.2f} on the validation text, {before[1]:.2f} on the test "
        f"text, {before[2]:.2f} on the other.",
        "",
        "| method | learning rate | perplexity | on the other text | added parameters | trained | bytes | "
        "peak memory | of dense | CPU seconds | of dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rates = [
        "",
        "On the validation text, first seed, by learning rate:",
        "",
        f"| method | {' | '.join(f'{rate:g}' for rate in RATES)} |",
        "|---|" + "---|" * len(RATES),
    ]
    dense: dict[str, float] = {}
    for method in METHODS:
        rate, scores, runs = compared(method, options, work)
        mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        dense = dense or mean
        lines.append(
            f"| {method.name} | {rate:g} | {spread([run['test'] for run in runs])} | "
            f"{spread([run['other'] for run in runs])} | {mean['added']:,.0f} | {mean['trained']:,.0f} | "
            f"{mean['bytes'] / 1e6:.1f} MB | {mean['memory'] / 1e9:.2f} GB | "
            f"{mean['memory'] / dense['memory']:.2f} | {mean['cpu']:.0f} | {mean['cpu'] / dense['cpu']:.2f} |"
        )
        cells = (f"{scores[rate]:.2f}" if rate in scores else "" for rate in RATES)
        rates.append(f"| {method.name} | {' | '.join(cells)} |")
        print(lines[-1], rates[-1], sep="\n", file=sys.stderr, flush=True)
    return [*lines, *rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "train", "test", "other"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--validation", type=Path, help="to choose learning rates on [the last tenth of TRAIN]")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from moetool.checkpoint.reader import Checkpoint
    from moetool.runtime.dense import DenseModel

    options.parameters = DenseModel(Checkpoint.open(options.model)).parameters
    named = f"{options.model.name} {options.train.name} {options.test.name} {options.other.name}"
    validation = "" if options.validation is None else f" --validation {options.validation.name}"
    command = f"python scripts/benchmarks/tune.py {named}{validation} --steps {options.steps} --seeds {options.seeds}"
    with tempfile.TemporaryDirectory() as directory:
        if options.validation is None:
            options.train, options.validation = held_out(options.train, Path(directory))
        lines = table(options, Path(directory))
    heading = ["# Training experts on the same tokens", "", made_by(f"{command} --windows {options.windows}"), ""]
    publish([*heading, *lines], options.output)


if __name__ == "__main__":
    main()
