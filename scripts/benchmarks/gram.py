"""G1: accumulating Gram matrices of bf16 activations, against the usual fp32 product.

    python scripts/benchmarks/gram.py [--quick] [--output FILE.md]

One thread, interleaved, medians of process_time over 16384 tokens in chunks of 2048. The peer widens the rows to fp32
and does `total += rows.T @ rows`. Without bf16 units in the processor no method can halve the operations and
multiply faster too, so the bound of the bf16 row is then 2x (only one triangle is computed).
"""

# ruff: noqa: E402  (the thread counts must be set before the libraries are loaded)

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from _common import processor, publish, race
from torch import Tensor

from moetool.numerics.gram import Gram
from moetool.numerics.precision import has_fast_bf16


def activations(tokens: int, n: int) -> Tensor:
    """bf16 rows with a power-law covariance and outlier channels, cond about 1e8. [tokens, n]."""
    generator = torch.Generator().manual_seed(n)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
    spread = torch.arange(1, n + 1) ** -0.5
    rows = (torch.randn(tokens, n, generator=generator) * spread) @ q.T
    rows[:, torch.randperm(n, generator=generator)[: max(4, n // 200)]] *= 300
    return rows.bfloat16()


def accumulate(chunks: list[Tensor]) -> Tensor:
    gram = Gram(chunks[0].shape[1])
    for chunk in chunks:
        gram.add(chunk)
    return gram.matrix()


def peer(chunks: list[Tensor]) -> Tensor:
    total = torch.zeros(chunks[0].shape[1], chunks[0].shape[1])
    for chunk in chunks:
        rows = chunk.float()
        total += rows.T @ rows
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and one repetition")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, repeats = (4096, 1) if options.quick else (16384, 9)
    lines = [
        f"Made by `python {' '.join(sys.argv)}` with torch {torch.__version__},",
        f"one thread of {processor()} ({torch.backends.cpu.get_cpu_capability()},",
        f"bf16 units: {'yes' if has_fast_bf16() else 'no'}).",
        "",
        "| id | workload | speed-up over fp32 peer | relative Frobenius error | lowest eigenvalue / true | wanted | |",
        "|---|---|---|---|---|---|---|",
    ]
    for n in (1024, 2048):
        rows = activations(tokens, n)
        narrow, wide = list(rows.split(2048)), list(rows.float().split(2048))
        methods = {
            "peer": partial(peer, narrow),
            "bf16 rows": partial(accumulate, narrow),
            "fp32 rows (fp64 mode)": partial(accumulate, wide),
        }
        seconds, results = race(methods, repeats)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        exact = rows.double().T @ rows.double()
        lowest = float(torch.linalg.eigvalsh(exact)[0])
        limits = {"peer": 0.0, "bf16 rows": 2.4, "fp32 rows (fp64 mode)": 1 / 1.2}
        for name, result in results.items():
            error = float(torch.linalg.norm(result.double() - exact) / torch.linalg.norm(exact))
            floor = float(torch.linalg.eigvalsh(result.double())[0]) / lowest
            ratio = median["peer"] / median[name]
            rounds = [a / b for a, b in zip(seconds["peer"], seconds[name], strict=True)]
            good = ratio >= limits[name] and error <= 2e-6 and floor > 0
            wanted = f">= {limits[name]:.2f}x, <= 2e-6" if limits[name] else "reference"
            lines.append(
                f"| G1 | {name}, n={n}, {tokens} tokens | {ratio:.2f}x of {median['peer']:.2f} s "
                f"(rounds {min(rounds):.2f} to {max(rounds):.2f}) | {error:.1e} "
                f"| {floor:+.4f} | {wanted} | {'PASS' if good else 'FAIL'} |"
            )
    publish(lines, options.output)


if __name__ == "__main__":
    main()
