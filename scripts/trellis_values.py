"""The values of the windows of `moetool/numerics/trellis.py`, learnt from normal numbers as Lloyd did it for levels.

    python scripts/trellis_values.py moetool/numerics

Each value becomes the mean of the numbers whose paths go through it, again and again. Writes `trellis-K.bf16` for every
number of bits, and prints the squared error that new numbers are left with.
"""

import argparse
import sys
from pathlib import Path

import torch

from moetool.compiled import compiler
from moetool.numerics import trellis

ROUNDS, NUMBERS, STARTS = 100, 1 << 19, 2


def found(table: torch.Tensor, bits: int, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The windows that the best path goes through, and its mean squared error."""
    order = trellis.reordered(torch.arange(len(table)), bits)
    trellis._newest_lowest = lambda _: table[order].contiguous()
    codes = torch.empty(len(numbers), dtype=torch.uint8)
    values = trellis.path(numbers, bits, codes)
    return trellis.windows(codes, bits).long(), float((values - numbers).square().mean())


def learnt(bits: int, seed: int) -> tuple[torch.Tensor, float]:
    """Values [2^window], and the error that they leave."""
    generator = torch.Generator().manual_seed(seed)
    size = 2**trellis.WINDOW
    quantiles = (torch.arange(size) + 0.5) / size
    table = (2**0.5 * torch.erfinv(2 * quantiles - 1))[torch.randperm(size, generator=generator)]
    for _ in range(ROUNDS):
        numbers = torch.randn(NUMBERS, generator=generator)
        states, _ = found(table, bits, numbers)
        counts = torch.bincount(states, minlength=size)
        sums = torch.bincount(states, weights=numbers.double(), minlength=size)
        table = ((sums + 4 * table) / (counts + 4)).float()
    table = table.bfloat16().float()
    return table, found(table, bits, torch.randn(NUMBERS, generator=generator))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=trellis.WIDTHS)
    options = parser.parse_args()
    if reason := compiler.problem():
        sys.exit(f"This takes the compiled path search: {reason}.")
    for bits in options.bits:
        table, error = min((learnt(bits, seed) for seed in range(STARTS)), key=lambda one: one[1])
        (options.directory / f"trellis-{bits}.bf16").write_bytes(table.bfloat16().view(torch.uint8).numpy().tobytes())
        print(f"{bits} bits: {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
