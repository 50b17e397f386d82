"""A published model through moetool's commands: upcycled, compressed, moefied, evaluated, spoken to.

    python scripts/get_smollm2.py MODEL
    python scripts/benchmarks/smollm2.py MODEL --calibration VALID.txt --data TEST.txt --work DIR [--output FILE.md]

Every result is evaluated and asked a question; the table grows by a row as each is done. A run that was stopped goes
on where it was; DIR needs 3 GB. What is upcycled here is not trained afterwards: vanilla's experts are equal, and those
of the two kinds that store the dense FFN once add nothing yet. So what is compressed has no deltas to lose: its bytes
are those of any such model, its perplexity tells what the base and its bits cost, and no more. Drop's result is where
training starts, not a model that speaks.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _common import Kept, made_by

QUESTION = "What is the capital of France?"
DENSE = "dense"


@dataclass(frozen=True)
class Step:
    """A command, what it reads (the result of another step), and whether the result must compute what that does."""

    name: str
    source: str
    command: tuple[str, ...]
    is_calibrated: bool = False
    is_exact: bool = False


def upcycle(method: str, *options: str, is_exact: bool = True) -> Step:
    command = ("upcycle", "--method", method, "--experts", "4", "--top-k", "2", *options)
    return Step(f"upcycle {method}", DENSE, command, is_exact=is_exact)


def compress(method: str, ratio: str, source: str) -> Step:
    command = ("compress", "--method", method, "--ratio", ratio)
    return Step(f"compress {method} {ratio} of {source}", f"upcycle {source}", command, is_calibrated=True)


STEPS = (
    upcycle("vanilla"),
    upcycle("drop", is_exact=False),
    upcycle("ders-lowrank", "--rank", "4"),
    upcycle("pesc", "--width", "64"),
    compress("hybrid", "0.6", "vanilla"),
    compress("d2moe", "0.4", "vanilla"),
    Step("moefy, keep 0.75", DENSE, ("moefy", "--experts", "64", "--keep", "0.75"), is_calibrated=True),
)


def moetool(*arguments: str) -> dict:
    """The JSON a command prints."""
    command = [sys.executable, "-m", "moetool", *arguments, "--json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(command)}\n{finished.stderr}")
    return json.loads(finished.stdout)


def lines_of(options: argparse.Namespace, kept: Kept) -> Iterator[str]:
    """The table, each row as soon as its step is done."""
    scale = ("--sequence-length", str(options.sequence_length))
    text = ("--calibration", options.calibration, "--samples", str(options.samples), *scale)
    inputs = {DENSE: options.model} | {step.name: str(options.work / step.name.replace(" ", "-")) for step in STEPS}

    def spoken(name: str) -> dict:
        evaluated = moetool("eval", inputs[name], "--data", options.data, "--windows", str(options.windows), *scale)
        answered = moetool("generate", inputs[name], QUESTION, "--max-new-tokens", "32")
        return {"perplexity": evaluated["perplexity"], "tokens": evaluated["tokens"], "answer": answered["text"]}

    def make(step: Step) -> dict:
        shutil.rmtree(inputs[step.name], ignore_errors=True)  # of a run that was stopped
        made = moetool(step.command[0], inputs[step.source], inputs[step.name], *step.command[1:],
                       *(text if step.is_calibrated else ()))  # fmt: skip
        return {"made": made, **spoken(step.name)}

    dense = kept.get(DENSE, partial(spoken, DENSE))
    found = {DENSE: dense}
    size = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors"))
    yield (
        f"Perplexity on the first {options.windows} windows of {options.sequence_length} tokens; calibrated on the "
        f"first {options.samples} of the other text. Nothing is trained, except moefy's selectors. Seconds are of the "
        f"clock, one thread, on a machine that others used too."
    )
    yield ""
    yield "| | bytes | perplexity | must be the same | seconds | peak memory | answer |"
    yield "|---|---|---|---|---|---|---|"
    yield f"| dense | {size / 1e6:.1f} MB | {dense['perplexity']:.4f} | | | | {_cell(dense['answer'])} |"
    for step in STEPS:
        result = found[step.name] = kept.get(step.name, partial(make, step))
        made, perplexity = result["made"], result["perplexity"]
        is_same = abs(perplexity / found[step.source]["perplexity"] - 1) < 1e-5
        verdict = ("yes: PASS" if is_same else "yes: missed") if step.is_exact else ""
        yield (
            f"| {step.name} | {made['bytes_after'] / 1e6:.1f} MB | {perplexity:.4f} | {verdict} "
            f"| {made['seconds']:.0f} | {made['peak_memory_bytes'] / 1e6:.0f} MB | {_cell(result['answer'])} |"
        )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what get_smollm2.py wrote")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True, help="for models, and for results as they come")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    command = "python scripts/benchmarks/smollm2.py MODEL --calibration VALID --data TEST --work DIR"
    lines = [
        f"{made_by(command)} MODEL is SmolLM2-135M-Instruct as `scripts/get_smollm2.py` writes it (30 layers, hidden "
        "576, FFN 1536, bf16, dequantized from Q4_1); VALID and TEST are WikiText-2's validation and test text. "
        f'Asked was "{QUESTION}".',
        "",
    ]
    kept = Kept(options.work / f"{options.samples}x{options.sequence_length}-{options.windows}.jsonl")
    for line in lines_of(options, kept):
        print(line, flush=True)
        lines.append(line)
        missing = [step.name for step in STEPS if not any(line.startswith(f"| {step.name} |") for line in lines)]
        if options.output:
            rest = ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
            options.output.write_text("\n".join([*lines, *rest]) + "\n")


if __name__ == "__main__":
    main()
