"""What published models take to compress, by the plans and the speeds that estimates are made of.

    python scripts/benchmarks/real_sizes.py CONFIG.json …

Nothing is compressed: each `config.json` is planned as `--dry-run` plans it, with the windows of the D²-MoE paper, and
with fewer. The first columns of hours are for this machine, whose speeds are measured; the others are for cards that
nobody has timed here: their speeds are assumed, and stand in `ASSUMED`.
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _common import made_by, publish

from moetool.checkpoint.sizes import format_bytes
from moetool.costs.machine import Machine, this_machine
from moetool.job.forecast import format_seconds
from moetool.job.plan import Plan
from moetool.job.planning import plan_stage
from moetool.stages import stages

MEMORY = 24_000_000_000  # that jobs may use
RATIOS = {"auto": 0.75, "d2moe": 0.4, "hybrid": 0.75}  # by method
# One 80 GB card of the H100's kind: half of its published peak for products, a third of its memory's bandwidth, dense
# eigen-solvers at a twentieth of its fp64 peak, and a local NVMe disk.
ASSUMED = Machine(
    products={"bfloat16": 2.5e14, "float32": 1.6e13, "float64": 1.6e13, "widened": 1.6e13},
    eigen={1024: 0.08, 4096: 3.0},
    cholesky={1024: 0.002, 4096: 0.02},
    moved=1e12,
    hashed=1.5e9,
    read=3e9,
    written=2e9,
    call=1e-5,
)
NODES, CARDS = 8, 8


def many(machine: Machine, nodes: int, cards: int) -> Machine:
    """The same in processes that share windows and matrices, a card for each, a disk for each node."""
    each = nodes * cards
    return replace(
        machine,
        products={precision: speed * each for precision, speed in machine.products.items()},
        eigen={n: seconds / each for n, seconds in machine.eigen.items()},
        cholesky={n: seconds / each for n, seconds in machine.cholesky.items()},
        moved=machine.moved * each,
        call=machine.call / each,
        hashed=machine.hashed * each,
        read=machine.read * nodes,
        written=machine.written * nodes,
    )


def planned(config: Path, method: str, **options: object) -> Plan:
    """A plan from `config.json` alone."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(config, Path(directory) / "config.json")
        kind = stages()[method]
        chosen = kind.options_type(calibration="text.txt", ratio=RATIOS[method], memory=MEMORY, **options)
        return plan_stage(kind, directory, chosen)


def row(config: Path, method: str, samples: int, here: Machine) -> str:
    """What a model takes with so many windows."""
    plan = planned(config, method, samples=samples)
    quick = planned(config, method, samples=samples, compute_dtype="bfloat16")
    machines = [(plan, here), (quick, here), (quick, ASSUMED), (quick, many(ASSUMED, NODES, CARDS))]
    hours = [format_seconds(sum(own.seconds(phase.work) for phase in told.phases)) for told, own in machines]
    sizes = map(format_bytes, (plan.input_bytes, plan.memory_bytes, plan.scratch_bytes))
    return f"| {config.stem} | `{method}` {RATIOS[method]:.0%} | {' | '.join(sizes)} | {' | '.join(hours)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--samples", default="512,64", help="windows of calibration text, with commas")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    here = this_machine(torch.device("cpu"), Path(tempfile.gettempdir()))
    lines = [
        f"{made_by('python scripts/benchmarks/real_sizes.py CONFIG.json …')} {torch.get_num_threads()} threads here, "
        f"{MEMORY / 1e9:.0f} GB of memory.",
        "Windows of 2048 tokens, or of as many as the context has, gradients on at most 128. Cards: assumed speeds.",
    ]
    for samples in map(int, options.samples.split(",")):
        lines += [
            "",
            f"{samples} windows:",
            "",
            "| model | method | size | memory | scratch | here, fp32 | here, bf16 | one card | 8 nodes of 8 cards |",
            "|---|---|---|---|---|---|---|---|---|",
            *(row(config, method, samples, here) for config in options.configs for method in RATIOS),
        ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
