"""Singular values, eigenvalues and Cholesky factors: which routine is fast and exact, on a card and on the CPU.

    python scripts/benchmarks/decompositions.py [--device cuda] [--small] [--output FILE.md]

Seconds are medians of wall time. The error of an SVD is what its factors of a fifth of the rank leave, above what those
of an fp64 SVD on the CPU leave; of an eigendecomposition or a root, that of the matrix made of it again. `factorize`
and `truncate` are moetool's own, whitened by a Gram matrix, with the whitened error above that on the CPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import made_by, publish, wait
from torch import Tensor

from moetool.numerics.factorize import factorize, truncate, whitened_error
from moetool.numerics.root import square_root

SHAPES = ((1408, 2048), (2048, 1408))
SMALL = ((96, 160), (160, 96))
SHARE = 0.2


def timed(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The first run, which warms up, is not counted."""
    seconds = []
    for number in range(rounds + 1):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        if number:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def problem(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix with singular values that fall, fp32, and a Gram matrix of condition 1e6, fp64."""
    generator = torch.Generator().manual_seed(0)
    rank = min(shape)
    left = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(shape[1], rank, generator=generator)).Q
    delta = (left * torch.arange(1, rank + 1) ** -0.3) @ right.T
    tokens = torch.randn(2 * shape[1], shape[1], generator=generator, dtype=torch.float64)
    tokens *= torch.logspace(-3, 0, shape[1], dtype=torch.float64)
    return delta, tokens.T @ tokens


def rows(shape: tuple[int, int], device: torch.device, rounds: int) -> list[str]:
    delta, gram = problem(shape)
    k = int(SHARE * min(shape))
    values = torch.linalg.svdvals(delta.double())
    best = float(values[k:].square().sum().sqrt())
    lines = []

    def line(what: str, where: torch.device, seconds: float, error: float) -> None:
        lines.append(f"| {shape[0]}×{shape[1]} | {what} | {where.type} | {seconds:.3f} | {error:.1e} |")
        print(lines[-1], file=sys.stderr, flush=True)

    errors: dict[str, float] = {}
    for where in dict.fromkeys((torch.device("cpu"), device)):
        own, whitening = delta.to(where), gram.to(where)
        for dtype in (torch.float32, torch.float64):
            for driver in ("gesvd", "gesvdj", "gesvda") if where.type == "cuda" else (None,):
                matrix = own.to(dtype)

                def svd(matrix: Tensor = matrix, driver: str | None = driver) -> tuple[Tensor, Tensor, Tensor]:
                    return torch.linalg.svd(matrix, full_matrices=False, driver=driver)

                u, s, v = svd()
                left = float((own.double() - (u[:, :k] * s[:k]).double() @ v[:k].double()).norm())
                name = f"svd {driver or 'gesdd'}, {str(dtype).removeprefix('torch.')}"
                line(name, where, timed(svd, rounds, where), left / best - 1)
            wide = whitening.to(dtype)
            roots, vectors = torch.linalg.eigh(wide)
            again = ((vectors * roots) @ vectors.T - wide).norm() / wide.norm()
            name = f"eigh of the Gram, {str(dtype).removeprefix('torch.')}"
            line(name, where, timed(lambda wide=wide: torch.linalg.eigh(wide), rounds, where), float(again))
        root = square_root(whitening)
        seconds = timed(lambda whitening=whitening: square_root(whitening), rounds, where)
        line("square_root, float64", where, seconds, float((root @ root.T - whitening).norm() / whitening.norm()))

        def moetool(own: Tensor = own, whitening: Tensor = whitening) -> tuple[Tensor, Tensor]:
            return truncate(own, factorize(own, gram=whitening, rank=k), k, torch.float32)

        seconds = timed(moetool, rounds, where)
        errors[where.type] = whitened_error(delta, *(factor.cpu() for factor in moetool()), gram=gram)
        line("factorize and truncate", where, seconds, errors[where.type] / errors["cpu"] - 1)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small matrices")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    lines = [
        made_by(f"python {' '.join(sys.argv)}"),
        "",
        "| matrix | what | where | seconds | error |",
        "|---|---|---|---|---|",
    ]
    try:
        for shape in SMALL if options.small else SHAPES:
            lines += rows(shape, torch.device(options.device), options.rounds)
    finally:
        publish(lines, options.output)


if __name__ == "__main__":
    main()
