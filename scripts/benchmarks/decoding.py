"""What it takes to decode a matrix in FP8, in blocks of 128 × 128, against a copy of the matrix in bf16.

    python scripts/benchmarks/decoding.py [--output FILE.md]

One thread, interleaved, medians of process_time. All begin from memory. What is written to new memory includes what the
system takes to give out its pages, which a copy in bf16 takes, too.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _common import made_by, publish, race
from torch import Tensor

from moetool.checkpoint.stored.fp8 import BlockScaled

ROWS, COLUMNS, BLOCK, REPEATS = 4096, 7168, 128, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    grid = ROWS // BLOCK, COLUMNS // BLOCK
    scales = torch.rand(grid, generator=generator)
    held = {"codes": codes.view(-1), "scales": scales.view(-1)}
    matrix = BlockScaled("matrix", codes.shape, torch.bfloat16, tuple(held), grid, (BLOCK, BLOCK))

    def spans(name: str, start: int, shape: tuple[int, ...]) -> Tensor:
        return held[name][start : start + math.prod(shape)].view(shape)

    def by_torch() -> Tensor:
        blocks = codes.float().view(grid[0], BLOCK, grid[1], BLOCK)
        return (blocks * scales[:, None, :, None]).bfloat16().view(ROWS, COLUMNS)

    plain = matrix.rows(spans, 0, ROWS)
    assert plain.view(torch.int16).equal(by_torch().view(torch.int16))
    used = torch.zeros_like(plain)
    methods: dict[str, Callable[[], object]] = {
        "copy of bf16, to used memory": lambda: used.copy_(plain),
        "copy of bf16, to new memory": plain.clone,
        "decoded, to new memory": lambda: matrix.rows(spans, 0, ROWS),
        "torch's conversion of the whole matrix": by_torch,
    }
    seconds, _ = race(methods, REPEATS)
    unit = statistics.median(seconds["copy of bf16, to new memory"])
    lines = [
        f"{made_by('python scripts/benchmarks/decoding.py')} One thread, {ROWS} × {COLUMNS} numbers.",
        "",
        "| operation | ns per number | / copy of bf16 to new memory |",
        "|---|---|---|",
    ]
    for name, times in seconds.items():
        taken = statistics.median(times)
        lines.append(f"| {name} | {taken / plain.numel() * 1e9:.2f} | {taken / unit:.2f}x |")
    publish(lines, options.output)


if __name__ == "__main__":
    main()
