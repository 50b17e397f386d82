"""Attention of one token to the keys in a cache: torch's, and that of moetool's kernels.

    python scripts/benchmarks/attention.py [--threads 2] [--output FILE]

Caches are random, and more than a processor holds. Both ways take turns; the least time of each counts, with one thread
that of the processor, which other programs prolong less. Errors are those of both to torch's in fp64.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import made_by, publish_as_made
from torch import Tensor
from torch.nn import functional as F

from moetool.kernels.attention import attend

HEADS = ((16, 4, 64), (16, 16, 64), (32, 8, 128), (32, 4, 128))  # of queries, of keys, numbers in each
LENGTHS = (16, 128, 512, 2048)
CACHE = 1 << 27  # bytes of keys and values
ROUNDS, CALLS = 9, 20


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def row(heads: int, keys: int, width: int, length: int, threads: int) -> str:
    count = min(512, max(2, CACHE // (4 * keys * width * length)))
    caches = torch.randn(count, 2, 1, keys, length, width).bfloat16()
    query, clock = torch.randn(1, heads, 1, width).bfloat16(), time.process_time if threads == 1 else time.perf_counter
    turn = itertools.cycle(caches)

    def torchs(key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=heads > keys)

    def ours(key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, None, width**-0.5)

    def go(way: Callable[[Tensor, Tensor], Tensor]) -> float:
        start = clock()
        for _ in range(CALLS):
            way(*next(turn))
        return (clock() - start) / CALLS * 1e6

    before, now = zip(*((go(torchs), go(ours)) for _ in range(ROUNDS)), strict=True)
    key, value = caches[0]
    right = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True).squeeze(2)
    errors = f"{relative(torchs(key, value).squeeze(2), right):.1e} | {relative(ours(key, value), right):.1e}"
    times = f"{min(before):.0f} | {min(now):.0f} | {min(before) / min(now):.1f}"
    return f"| {heads} / {keys} × {width} | {length} | {times} | {errors} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    head = [
        made_by(f"python {' '.join(sys.argv)}"),
        "",
        f"{options.threads} thread(s), bf16:",
        "",
        "| heads of queries / of keys × width | keys | torch, µs | kernels, µs | times as fast | error | of kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = (row(*heads, length, options.threads) for heads, length in itertools.product(HEADS, LENGTHS))
    publish_as_made(head, rows, options.output)


if __name__ == "__main__":
    main()
