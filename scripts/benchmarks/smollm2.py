"""A published model through moetool's commands: upcycled, tuned, compressed, moefied, evaluated, spoken to.

    python scripts/get_smollm2.py MODEL
    python scripts/python_questions.py QUESTIONS
    python scripts/benchmarks/smollm2.py MODEL --questions QUESTIONS --calibration VALID.txt --data TEST.txt --work DIR

Every result is evaluated on a text and on answers that were held out, and asked a question; the table grows by a row
as each is done. A run that was stopped goes on where it was; DIR needs 7 GB. Tuning is short: experts hardly part, so
what is compressed has small deltas, and its perplexity tells what the base and its bits cost. Drop's result is where
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

import torch
from _common import Kept, made_by

QUESTION = "What is the capital of France?"
DENSE = "dense"
TOP_2 = ("--top-k", "2")


@dataclass(frozen=True)
class Step:
    """A command, what it reads (the result of another step), and whether the result must compute what that does."""

    name: str
    source: str
    command: tuple[str, ...]
    is_exact: bool = False


def upcycle(method: str, *options: str, is_exact: bool = True) -> Step:
    command = ("upcycle", "--method", method, "--experts", "4", *options)
    return Step(f"upcycle {method}", DENSE, command, is_exact=is_exact)


def tune(method: str, rate: str) -> Step:
    command = ("tune", "--steps", "40", "--batch-size", "4", "--sequence-length", "256", "--learning-rate", rate)
    return Step(f"tuned {method}", f"upcycle {method}", command)


def compress(method: str, *options: str) -> Step:
    source = "tuned vanilla"
    return Step(f"{source}, {method} {options[-1]}", source, ("compress", "--method", method, *options))


STEPS = (
    upcycle("vanilla", *TOP_2),
    upcycle("fine-grained", *TOP_2),
    upcycle("drop", *TOP_2, is_exact=False),
    upcycle("ders-lowrank", *TOP_2, "--rank", "4"),
    upcycle("pesc", *TOP_2, "--width", "64"),
    upcycle("simoe"),
    tune("vanilla", "5e-5"),
    compress("d2moe", "--ratio", "0.4"),
    compress("hybrid", "--ratio", "0.6"),
    compress("quantize", "--bits", "4"),
    Step("moefy, keep 0.75", DENSE, ("moefy", "--experts", "64", "--keep", "0.75")),
    tune("ders-lowrank", "5e-5"),
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
    text = ("--calibration", options.calibration, "--mix", "0", "--samples", str(options.samples), *scale)
    inputs = {DENSE: options.model} | {step.name: str(options.work / step.name.replace(" ", "-")) for step in STEPS}

    train, held_out = (str(options.questions / f"{part}.jsonl") for part in ("train", "test"))
    extra = {"compress": text, "moefy": text, "tune": ("--data", train, "--eval-data", held_out)}

    def perplexity(name: str, data: str) -> float:
        found = moetool("eval", inputs[name], "--data", data, "--windows", str(options.windows), *scale)
        return found["perplexity"]

    def spoken(name: str) -> dict:
        said = moetool("generate", inputs[name], QUESTION, "--max-new-tokens", "32")
        return {
            "perplexity": perplexity(name, options.data),
            "answers": perplexity(name, str(options.questions / "test.txt")),
            "answer": said["text"],
        }

    def speeds(name: str) -> dict:
        found = moetool("bench", inputs[name], "--batch", "1", "--lengths", "128", "--rounds", "3")
        return found["model"]["cases"][0]

    def speed_of(name: str) -> str:
        case = kept.get(f"{name}, tokens/s", partial(speeds, name))
        return f"{case['prefill_tokens_per_second']:.0f} / {case['decode_tokens_per_second']:.1f}"

    def make(step: Step) -> dict:
        shutil.rmtree(inputs[step.name], ignore_errors=True)  # of a run that was stopped
        made = moetool(step.command[0], inputs[step.source], inputs[step.name], *step.command[1:],
                       *extra.get(step.command[0], ()))  # fmt: skip
        return {"made": made, **spoken(step.name)}

    dense = kept.get(DENSE, partial(spoken, DENSE))
    found = {DENSE: dense}
    size = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors"))
    yield (
        f"Perplexity on the first {options.windows} windows of {options.sequence_length} tokens, and on questions "
        f"about Python with their answers, a tenth that was held out of what `tune` trains on; calibrated on the first "
        f"{options.samples} windows of the other text. Seconds are of the clock, "
        f"{torch.get_num_threads()} thread(s), on a machine that others used too. Tokens/s are of "
        "a prompt of 128, and of 32 that follow one by one, by `bench` in bf16."
    )
    yield ""
    yield "| | bytes | WikiText | answers | must be the same | seconds | peak memory | tokens/s | answer |"
    yield "|---|---|---|---|---|---|---|---|---|"
    yield (
        f"| dense | {size / 1e6:.1f} MB | {dense['perplexity']:.4f} | {dense['answers']:.4f} | | | "
        f"| {speed_of(DENSE)} | {_cell(dense['answer'])} |"
    )
    for step in STEPS:
        result = found[step.name] = kept.get(step.name, partial(make, step))
        made, loss = result["made"], result["perplexity"]
        is_same = abs(loss / found[step.source]["perplexity"] - 1) < 1e-5
        verdict = ("yes: PASS" if is_same else "yes: missed") if step.is_exact else ""
        yield (
            f"| {step.name} | {made['bytes_after'] / 1e6:.1f} MB | {loss:.4f} | {result['answers']:.4f} | {verdict} "
            f"| {made['seconds']:.0f} | {made['peak_memory_bytes'] / 1e6:.0f} MB "
            f"| {speed_of(step.name)} | {_cell(result['answer'])} |"
        )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what get_smollm2.py wrote")
    parser.add_argument("--questions", type=Path, required=True, help="what python_questions.py wrote")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True, help="for models, and for results as they come")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    command = "python scripts/benchmarks/smollm2.py MODEL --questions DIR --calibration VALID --data TEST --work DIR"
    lines = [
        f"{made_by(command)} MODEL is SmolLM2-135M-Instruct as `scripts/get_smollm2.py` writes it (30 layers, hidden "
        "576, FFN 1536, bf16, dequantized from Q4_1); VALID and TEST are WikiText-2's validation and test text. "
        f'Asked was "{QUESTION}".',
        "",
    ]
    kept = Kept(options.work / f"tuned-{options.samples}x{options.sequence_length}-{options.windows}.jsonl")
    for line in lines_of(options, kept):
        print(line, flush=True)
        lines.append(line)
        missing = [step.name for step in STEPS if not any(line.startswith(f"| {step.name} |") for line in lines)]
        if options.output:
            rest = ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
            options.output.write_text("\n".join([*lines, *rest]) + "\n")


if __name__ == "__main__":
    main()
