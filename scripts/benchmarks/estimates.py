"""What `--dry-run` says a job takes against what it then takes, phase by phase.

    python scripts/benchmarks/estimates.py DENSE MOE --calibration TEXT [--jobs moefy d2moe] [--output FILE.md]

Runs every job in this process on one thread and compares processor seconds, which other processes disturb less than
they do the clock, with the estimate for one thread, less what it has for waiting for the disk. The last column has the
kinds of work that the estimate is made of: where a ratio is far from 1, the coefficient behind the largest of them
(moetool/costs/coefficients.py) is the one to fit.
Measures the machine again first: run it while nothing else does.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _common import made_by, publish

# By name: the stage, which model it takes (or what an earlier job made), and options beside the calibration text.
JOBS: dict[str, tuple[str, str, dict[str, object]]] = {
    "vanilla": ("vanilla", "dense", {"experts": 8}),
    "drop": ("drop", "dense", {"experts": 8}),
    "moefy": ("g-moefication", "dense", {"experts": 64, "samples": 64, "sequence_length": 512}),
    "ders-quantize": ("ders-quantize", "moe", {"bits": 4, "calibration": None}),
    "ders-quantize-2": ("ders-quantize", "moe", {"bits": 2, "calibration": None}),
    "ders-sparsify": ("ders-sparsify", "moe", {"drop": 0.9}),
    "ders-magnitude": ("ders-sparsify", "moe", {"drop": 0.9, "select": "magnitude"}),
    "ders-quantize-text": ("ders-quantize", "moe", {"bits": 4, "samples": 16}),
    "decompose": ("decompose", "moe", {}),
    "quantize-delta": ("quantize-delta", "decompose", {"bits": 3, "calibration": None}),
    "svd-compress": ("svd-compress", "decompose", {"ratio": 0.3, "samples": 16}),
    "svd-vanilla": ("svd-compress", "decompose", {"ratio": 0.3, "svd": "vanilla", "calibration": None}),
    "prune-base": ("prune-base", "decompose", {"ratio": 0.1, "samples": 16}),
    "export": ("dense-experts", "ders-quantize", {}),
    "fisher-merge": ("fisher-merge", "moe", {"samples": 16}),
    "d2moe": ("d2moe", "moe", {"ratio": 0.4, "samples": 16}),
    "hybrid": ("hybrid", "moe", {"ratio": 0.75, "samples": 16}),
    "quantize": ("quantize", "moe", {"ratio": 0.75, "samples": 16}),
    "auto": ("auto", "moe", {"ratio": 0.8, "samples": 16}),
    "auto-best": ("auto", "moe", {"ratio": 0.8, "samples": 16, "effort": "best"}),
}


class Clock:
    """Processor seconds of every phase: from when it begins until the next does."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "", time.process_time()

    def expect(self, phases: Sequence[object]) -> None:
        self.start("", 0)

    def start(self, phase: str, total: int, unit: str = "") -> None:
        now = time.process_time()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0) + now - self._since
        self._phase, self._since = phase, now

    def advance(self) -> None: ...

    def skip(self, steps: int) -> None: ...

    def finish(self, *, stopped: bool = False) -> None: ...

    def log(self, message: str) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense")
    parser.add_argument("moe")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--measured", action="store_true", help="Take what was measured of this machine before.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not options.measured:
        os.environ["MOETOOL_MEASURE"] = "again"
    import torch

    torch.set_num_threads(1)
    from moetool.calibration import streaming  # noqa: F401  # what is imported takes its time before the clock runs
    from moetool.convert import proof  # noqa: F401
    from moetool.costs.machine import this_machine
    from moetool.job.execute import run_stage
    from moetool.job.planning import plan_stage
    from moetool.stages import stages

    lines = [
        "| job | phase | predicted, s | taken, s | ratio | predicted by kind of work |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        machine = this_machine(torch.device("cpu"), work)
        os.environ["MOETOOL_MEASURE"] = ""
        made = {"dense": options.dense, "moe": options.moe}
        for job in _with_sources(options.jobs):
            name, source, asked = JOBS[job]
            kind = stages()[name]
            given = {"calibration": options.calibration, "device": "cpu", **asked}
            if "samples" in asked and name != "g-moefication":
                given = {"sequence_length": 512, **given}
            chosen = kind.options_type(
                **{key: own for key, own in given.items() if key in kind.options_type.model_fields}
            )
            plan = plan_stage(kind, made[source], chosen)
            clock = Clock()
            run_stage(kind, made[source], work / job, chosen, progress=clock)
            clock.start("", 0)
            made[job] = work / job
            if job in options.jobs:
                lines += (rows := _compared(job, plan, clock.seconds, machine))
                print(*rows, sep="\n", flush=True)
            if job not in {entry[1] for entry in JOBS.values()}:
                shutil.rmtree(work / job)
    publish(
        [*lines, "", made_by("python scripts/benchmarks/estimates.py DENSE MOE --calibration TEXT")], options.output
    )


def _with_sources(jobs: list[str]) -> list[str]:
    """The same with those whose results they take before them."""
    found: list[str] = []
    for job in jobs:
        found += [name for name in (JOBS[job][1], job) if name in JOBS and name not in found]
    return found


def _compared(job, plan, taken, machine) -> list[str]:
    rows, sums = [], [0.0, 0.0]
    for phase in plan.phases:
        kinds = machine.seconds_by_kind(phase.work)
        predicted, actual = (
            sum(own for kind, own in kinds.items() if kind not in ("read", "written")),
            taken.get(phase.name, 0.0),
        )
        sums = [sums[0] + predicted, sums[1] + actual]
        shown = ", ".join(
            f"{kind} {own:.2g}" for kind, own in sorted(kinds.items(), key=lambda entry: -entry[1])[:4] if own >= 0.01
        )
        rows.append(_row("", phase.name, predicted, actual, shown))
    unforeseen = {name: own for name, own in taken.items() if name not in {phase.name for phase in plan.phases}}
    shown = ", ".join(f"{name or 'outside'} {own:.1f} s" for name, own in unforeseen.items() if own > 0.05)
    return [_row(f"**{job}**", "in all", *sums, f"(not predicted: {shown})" if shown else ""), *rows]


def _row(job: str, phase: str, predicted: float, actual: float, shown: str) -> str:
    ratio = f"{predicted / actual:.2f}" if actual else ""
    return f"| {job} | {phase} | {predicted:.1f} | {actual:.1f} | {ratio} | {shown} |"


if __name__ == "__main__":
    main()
