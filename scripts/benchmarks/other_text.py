"""What compressed models lose on text of their calibration's kind and on text of other kinds.

    python scripts/benchmarks/other_text.py MODEL… --text VALID.txt --tests home=TEST.txt perldoc=PERL.txt --work DIR

Every method of --methods compresses every MODEL on every text of --calibrations, with every number and length of
windows of --shapes and every seed, through the command line. Each result is compared with its MODEL on every text of
--tests, on `code` (60 files of Python's standard library, drawn with seed 0) and on `questions` (those about Python
that `scripts/python_questions.py` holds out), noted in DIR and deleted. A run that was stopped goes on where it was.
The first of --tests is home: text of the kind of --text, for which TEXT stands in --calibrations. Rows of --nearest
take no text.
"""

import argparse
import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from _common import Kept, made_by, publish

from moetool.measure.perplexity import EvaluationOptions, perplexity

CALIBRATIONS = ("text=TEXT", "half=TEXT,bundled", "bundled=bundled", "self=self")
METHODS = (
    "d2moe 40 %=--method d2moe --ratio 0.4",
    "hybrid 75 %=--method hybrid --ratio 0.75",
    "quantize 75 %=--method quantize --ratio 0.75",
    "auto 80 %=--method auto --ratio 0.8",
)
NEAREST = ("nearest 3 bits=--method quantize --bits 3",)
CODE_FILES = 60
QUESTIONS = Path(__file__).parents[1] / "python_questions.py"


@dataclass(frozen=True)
class Run:
    """One way to compress a model: a method's options, a calibration text or none, its windows, and a seed."""

    method: str
    flags: str
    calibration: str
    data: str | None
    shape: str
    seed: int

    def arguments(self) -> list[str]:
        """Of `moetool compress`, behind its input and output."""
        found = [*shlex.split(self.flags), "--seed", str(self.seed)]
        if self.data is None:
            return found
        samples, length = self.shape.split("x")
        return [*found, "--calibration", self.data, "--mix", "0", "--samples", samples, "--sequence-length", length]


def named(entries: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` by name."""
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def own_tests(work: Path) -> dict[str, str]:
    """The texts that any machine has, written once: Python's standard library, and questions about it with answers."""
    code, questions = work / "code.txt", work / "questions" / "test.txt"
    if not code.exists():
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in library.rglob("*.py") if not {"site-packages", "test"} & {*path.parts})
        drawn = random.Random(0).sample(files, CODE_FILES)
        code.write_text("\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in drawn))
    if not questions.exists():
        subprocess.run([sys.executable, str(QUESTIONS), str(questions.parent)], check=True, stdout=subprocess.DEVNULL)
    return {"code": str(code), "questions": str(questions)}


def compressed(model: str, target: Path, run: Run) -> dict[str, Any]:
    """What `moetool compress` says of the result that it leaves in `target`."""
    shutil.rmtree(target, ignore_errors=True)  # of a run that was stopped
    command = [sys.executable, "-m", "moetool", "compress", model, str(target), *run.arguments(), "--json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{shlex.join(command)}\n{finished.stderr}")
    return json.loads(finished.stdout)


def measured(model: str, run: Run, tests: dict[str, str], length: int, windows: int, work: Path) -> dict[str, Any]:
    """What a model, compressed in this way, loses on every test: KL divergence and the share of equal top-1 tokens."""
    target = work / "model"
    made = compressed(model, target, run)
    losses = {}
    for name, data in tests.items():
        options = EvaluationOptions(data=data, sequence_length=length, windows=windows, against=model)
        against = perplexity(str(target), options).against
        assert against is not None
        losses[name] = {"kl": against.kl, "top1": against.agreement, "excess": against.excess}
    shutil.rmtree(target)
    return {"achieved": made["achieved_ratio"], "seconds": made["seconds"], "losses": losses}


def runs_of(options: argparse.Namespace) -> Iterator[Run]:
    """Every way to compress a model, the nearest codes first; seeds of one way follow each other."""
    for method, flags in named(options.nearest).items():
        yield Run(method, flags, "none", None, "", 0)
    methods, texts = named(options.methods).items(), named(options.calibrations).items()
    for (method, flags), shape, (name, data), seed in product(methods, options.shapes, texts, options.seeds):
        yield Run(method, flags, name, data.replace("TEXT", options.text), shape, seed)


def row(run: Run, results: Sequence[dict[str, Any]], home: str) -> str:
    """A line of the table: means over seeds, and with several the largest distance of a seed's KL from their mean."""
    names = list(results[0]["losses"])
    kls = {name: [1000 * each["losses"][name]["kl"] for each in results] for name in names}
    means = {name: statistics.fmean(values) for name, values in kls.items()}
    cells = []
    for name in names:
        off = max(abs(value - means[name]) for value in kls[name])
        top1 = statistics.fmean(each["losses"][name]["top1"] for each in results)
        cells.append(f"{means[name]:.2f}{f' ± {off:.2f}' if len(results) > 1 else ''}, {top1:.1%}")
    worst = max(mean / means[home] for name, mean in means.items() if name != home)
    achieved = statistics.fmean(each["achieved"] for each in results)
    return f"| {run.method} | {run.calibration} | {run.shape} | {achieved:.1%} | {' | '.join(cells)} | {worst:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", required=True, help="to calibrate on: of the kind of the first of --tests")
    parser.add_argument("--tests", nargs="+", required=True, metavar="NAME=DATA")
    parser.add_argument("--methods", nargs="*", default=METHODS, metavar="NAME=OPTIONS")
    parser.add_argument("--nearest", nargs="*", default=NEAREST, metavar="NAME=OPTIONS")
    parser.add_argument("--calibrations", nargs="+", default=CALIBRATIONS, metavar="NAME=DATA")
    parser.add_argument("--shapes", nargs="+", default=["64x256"], metavar="WINDOWSxTOKENS", help="of calibrations")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--windows", type=int, default=64, help="of every test")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a window of a test")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="write the tables to this file as well")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    kept, home = Kept(options.work / "losses.jsonl"), next(iter(named(options.tests)))
    tests = named(options.tests) | own_tests(options.work)
    scale = f"--windows {options.windows} --sequence-length {options.sequence_length}"
    command = f"python scripts/benchmarks/other_text.py MODEL --text VALID --tests … {scale}"
    lines = [
        f"{made_by(command)} KL divergence from the original in thousandths of a nat, and the share of tokens for "
        f"which both find the same one likeliest; seeds {', '.join(map(str, options.seeds))}. The last column is the "
        f"most that a text of another kind loses, over what {home} does.",
    ]
    for model in options.models:
        lines += ["", f"## {Path(model).resolve().name}", ""]
        lines.append(f"| | calibrated on | windows | smaller by | {' | '.join(tests)} | worst / {home} |")
        lines.append("|---|---|---|---|" + "---|" * (len(tests) + 1))
        ways: dict[tuple[str, str, str], tuple[Run, list[dict[str, Any]]]] = {}
        for run in runs_of(options):
            key = f"{Path(model).resolve()} {run} {tests} {scale}"
            make = partial(measured, model, run, tests, options.sequence_length, options.windows, options.work)
            found = kept.get(key, make)
            ways.setdefault((run.method, run.calibration, run.shape), (run, []))[1].append(found)
            print(row(run, [found], home), file=sys.stderr, flush=True)
        lines += [row(run, results, home) for run, results in ways.values()]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
