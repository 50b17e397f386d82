"""Q1, Q2: unpacking few-bit codes and decoding seeded sparse matrices, against a copy of the matrix in bf16.

    python scripts/benchmarks/packing.py [--quick] [--output FILE.md]

One thread, interleaved, medians of process_time. The unit is one copy of 33.5 M bf16 elements into memory that was
used before; packing and unpacking write into such memory too. A sparse decode makes the indices from the seed, sets
the matrix to zero and scatters the values into it.
"""

# ruff: noqa: E402  (the thread counts must be set before the libraries are loaded)

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import hashlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _common import processor, publish, race
from torch import Tensor

from moetool.numerics import sampling
from moetool.numerics.packing import pack, packed_size, unpack
from moetool.numerics.quantization import BITS, dequantize
from moetool.numerics.sampling import sample, scatter
from moetool.representations.quantized import Quantized
from moetool.representations.sparse import Sparse

KEEP = 0.1


def decode(values: Tensor, seed: int, out: Tensor) -> None:
    scatter(values, torch.from_numpy(sample(len(out), len(values), seed)), out)


def digest(n: int, k: int, seed: int, block: int) -> str:
    """Hash of an index set made in blocks of another size than usual."""
    usual, sampling._BLOCK = sampling._BLOCK, block
    try:
        return hashlib.sha256(sample(n, k, seed).tobytes()).hexdigest()
    finally:
        sampling._BLOCK = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the elements and three repetitions")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, columns, repeats = (1024, 4096, 3) if options.quick else (8192, 4096, 11)
    n = rows * columns
    k = Sparse(1 - KEEP, 0).count((rows, columns))
    matrix = torch.randn(n, generator=torch.Generator().manual_seed(0)).bfloat16()
    copy, codes, values = torch.empty_like(matrix), torch.zeros(n, dtype=torch.uint8), matrix[:k].clone()
    methods: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(matrix)}
    wanted = {"copy": 0.0}
    for bits in (1, 2, 4, 3, 8):
        source = torch.randint(0, 1 << bits, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
        packed = pack(source, bits)
        assert unpack(packed, bits, n).equal(source)
        limit = 1.3 if bits in (1, 2, 4) else 0.0
        methods[f"pack {bits} bit"] = lambda source=source, bits=bits, packed=packed: pack(source, bits, packed)
        methods[f"unpack {bits} bit"] = lambda bits=bits, packed=packed: unpack(packed, bits, n, codes)
        wanted |= {f"pack {bits} bit": limit, f"unpack {bits} bit": limit}
    scales = torch.ones(rows, columns // 128, dtype=torch.bfloat16)
    methods["dequantize 4 bit (codes to new bf16 matrix)"] = lambda: dequantize(codes & 15, scales, 4, torch.bfloat16)
    methods["indices from a seed"] = lambda: sample(n, k, 3)
    methods["sparse decode, surplus removed"] = lambda: decode(values, 2, copy)
    methods["sparse decode, deficit added"] = lambda: decode(values, 3, copy)
    wanted |= {name: 6.0 if name.startswith("sparse") else 0.0 for name in methods if name not in wanted}
    seconds, _ = race(methods, repeats)
    unit = statistics.median(seconds["copy"])
    lines = [
        f"Made by `python {' '.join(sys.argv)}` with torch {torch.__version__}, numpy {np.__version__},",
        f"one thread of {processor()} ({torch.backends.cpu.get_cpu_capability()}), {n / 1e6:.1f} M elements, "
        f"{k / 1e6:.2f} M kept.",
        "",
        "| id | operation | time / copy of the bf16 matrix (rounds) | wanted | |",
        "|---|---|---|---|---|",
    ]
    for name, times in seconds.items():
        rounds = [a / b for a, b in zip(times, seconds["copy"], strict=True)]
        ratio, limit = statistics.median(times) / unit, wanted[name]
        verdict = "" if not limit else "PASS" if ratio <= limit else "FAIL"
        label = "Q2" if name.startswith("sparse") else "Q1" if limit else ""
        lines.append(
            f"| {label} | {name} | {ratio:.2f}x of {unit * 1e3:.1f} ms ({min(rounds):.2f} to {max(rounds):.2f}) "
            f"| {f'<= {limit}' if limit else ''} | {verdict} |"
        )
    hashes = {digest(n, k, 3, block) for block in (1 << 14, 1 << 14, 1 << 13, 12345)}
    lines += [
        "",
        f"Q2, identical bits in two runs and two other block sizes: {'PASS' if len(hashes) == 1 else 'FAIL'} "
        f"({min(hashes)[:16]}).",
        "",
        "| stored as | bytes | theory | |",
        "|---|---|---|---|",
    ]
    shape, bf16 = (rows, columns), torch.bfloat16
    sizes = {f"sparse:{1 - KEEP}:SEED": (Sparse(1 - KEEP, 3).nbytes(shape, bf16), 2 * round(n * KEEP))}
    for bits in BITS:
        assert packed_size(n, bits) == n * bits // 8
        sizes[f"quantised:{bits}:128"] = (Quantized(bits, 128).nbytes(shape, bf16), n * bits // 8 + 2 * n // 128)
    for name, (ours, theory) in sizes.items():
        lines.append(f"| {name} | {ours:,} | {theory:,} | {'PASS' if ours == theory else 'FAIL'} |")
    publish(lines, options.output)


if __name__ == "__main__":
    main()
