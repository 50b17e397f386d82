"""Held-out perplexity at equal bytes: what each part of the method is worth.

    python scripts/benchmarks/quality.py MODEL --calibration VALID.txt --data TEST.txt

Compresses MODEL by every method and ratio through the command line, evaluates each result on the whole of --data, and
prints a table. Excess is the log of the perplexity ratio to the original; `relative` is to the published method's
(Fisher base, truncation-aware SVD, uniform rank). Of several texts in --data, with commas, the first is of the
calibration's kind; the KL divergence on every one is in the last columns.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from _common import Kept, excess, made_by

UNIFORM = ["--allocation", "uniform", "--sensitivity", "none"]
METHODS = {
    "mean base + plain SVD, uniform": [*UNIFORM, "--merge", "mean", "--svd", "vanilla"],
    "Fisher base + plain SVD, uniform": [*UNIFORM, "--svd", "vanilla"],
    "Fisher base + truncation-aware SVD, uniform": UNIFORM,
    "moetool's default": [],
    "`--refine 64`": ["--refine", "64"],
    "`--factor-bits 8`": ["--factor-bits", "8"],
    "`--method hybrid`": ["--method", "hybrid"],
}
PUBLISHED = "Fisher base + truncation-aware SVD, uniform"


def moetool(*arguments: str) -> dict:
    """The JSON a command prints."""
    command = [sys.executable, "-c", "from moetool.cli import main; main()", *arguments, "--json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(finished.stderr)
    return json.loads(finished.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--samples", default="64")
    parser.add_argument("--sequence-length", default="256")
    parser.add_argument("--windows", help="of --data, the first so many; all")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4, 0.6])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-quality")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    scale = ["--sequence-length", options.sequence_length]
    scale += ["--windows", options.windows] if options.windows else []
    settings = [options.model, options.calibration, options.data, options.samples, *scale]
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:12]
    kept = Kept(options.work / f"scores-{digest}.jsonl")

    def score(path: Path | str) -> dict:
        return moetool("eval", str(path), "--data", options.data, "--against", options.model, *scale)

    def make(ratio: float, flags: list[str]) -> dict:
        target = options.work / "model"
        shutil.rmtree(target, ignore_errors=True)
        made = moetool(
            "compress", options.model, str(target), "--method", "d2moe", "--ratio", str(ratio),
            "--calibration", options.calibration, "--mix", "0", "--samples", options.samples,
            "--sequence-length", options.sequence_length, *flags,
        )  # fmt: skip
        return {"achieved": made["achieved_ratio"], "seconds": made["seconds"], **score(target)}

    original = kept.get("original", lambda: score(options.model))
    scores = {}
    for name, flags in METHODS.items():
        for ratio in options.ratios:
            key = f"{name} {ratio}"
            scores[key] = kept.get(key, partial(make, ratio, flags))
            print(key, scores[key]["perplexity"], file=sys.stderr, flush=True)

    def above(key: str) -> float:
        return excess(scores[key]["texts"][0]["perplexity"], original["texts"][0]["perplexity"])

    home = original["texts"][0]
    names = [Path(text["name"]).name for text in original["texts"]]
    columns = "".join(f" KL, mnat, {name} |" for name in names)
    lines = [
        f"Original: perplexity {home['perplexity']:.4f} on {home['windows']} windows of "
        f"{original['sequence_length']} tokens. Calibrated on {options.samples} windows.",
        "",
        f"| smaller by | method | bytes saved | perplexity | excess loss | relative |{columns}",
        "|---|---|---|---|---|---|" + "---|" * len(names),
    ]
    for ratio in options.ratios:
        for name in METHODS:
            key = f"{name} {ratio}"
            relative = above(key) / above(f"{PUBLISHED} {ratio}")
            texts = scores[key]["texts"]
            lost = "".join(f" {1000 * text['against']['kl']:.2f} |" for text in texts)
            lines.append(
                f"| {ratio:.0%} | {name} | {scores[key]['achieved']:.3%} | {texts[0]['perplexity']:.4f} "
                f"| {above(key):.5f} | {relative:.3f} |{lost}"
            )
    table = "\n".join(lines)
    print(table)
    if options.output:
        command = (
            "python scripts/benchmarks/quality.py MODEL --calibration VALID --data TEST "
            f"--samples {options.samples} {' '.join(scale)}"
        )
        options.output.write_text(
            f"{made_by(command)} MODEL is a Mixtral of 20.7 M parameters (8 experts, top-2, bf16), trained for this "
            f"purpose; VALID and TEST are WikiText-2's validation and test text.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
