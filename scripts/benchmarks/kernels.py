"""Products with stored matrices: kernels, and the eager form, against a dense product in bf16.

    python scripts/benchmarks/kernels.py [--device cuda] [--small] [--forms SPEC …] [--output FILE.md]

Matrices are random and stored by each representation in turn; nothing is measured on how well. `few` is what decodes
while it multiplies (`routed`), `many` unpacks the matrix once (`linear`), `eager` is the module's own product, as it is
used for training; the numbers say how many times as fast as `F.linear` with the dense bf16 matrix they are. All take
turns; medians. Every round goes through several copies of a matrix, so that it comes from memory, not from a cache; on
a card as a CUDA graph, as generated tokens are computed. The error is that of `few` for activations in fp32, against
the matrix that the stored form stands for.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import made_by, publish, wait
from torch import Tensor
from torch.nn import functional as F

from moetool.kernels.operands import UnsupportedMatrixError
from moetool.kernels.products import linear, problem, routed
from moetool.kernels.table import Table
from moetool.representations import parse_representation

FORMS = (
    *("dense", "quantised-weight:1:128", "quantised-weight:2:128", "quantised-weight:3:128", "quantised-weight:4:128"),
    *("quantised-weight:8:128", "nf4", "int8", "low-rank:RANK", "quantised-low-rank:RANK:3:128", "sparse:0.9:1"),
)
SHAPES = ((4096, 14336), (14336, 4096), (2048, 768))  # out and in; of Mixtral-8x7B, and of Qwen3-30B-A3B
SMALL = ((512, 1024), (768, 512))
TOKENS = (1, 4, 16, 64, 256)
MOST_FEW = 64  # tokens beyond which `routed` is not tried
CACHE = 1 << 27  # bytes of dense matrices that are gone through
RANK_SHARE = 0.2  # numbers in the factors, of those in the matrix


class Stored(NamedTuple):
    """Copies of a matrix."""

    weights: list[Any]
    tables: list[Table]  # one each; none if kernels do not know the form


def rank_of(shape: tuple[int, int]) -> int:
    """A multiple of 128, so that groups fit."""
    return max(128, round(RANK_SHARE * shape[0] * shape[1] / sum(shape) / 128) * 128)


def store(spec: str, shape: tuple[int, int], copies: int, device: torch.device) -> Stored:
    """Random numbers in every tensor of a form, of sensible size."""
    form = parse_representation(spec.replace("RANK", str(rank_of(shape))))
    generator = torch.Generator(device).manual_seed(0)
    weights: list[Any] = []
    for _ in range(copies):
        weight: Any = form.build(shape, torch.bfloat16, device).requires_grad_(False).eval()
        for tensor in (*weight.parameters(), *weight.buffers()):
            if tensor.dtype in (torch.uint8, torch.int8):
                tensor.random_(-127 if tensor.dtype == torch.int8 else 0, 128, generator=generator)
            elif tensor.is_floating_point():
                tensor.uniform_(-0.02, 0.02, generator=generator)
        weights.append(weight)
    try:
        tables = [Table([weight.products()], shape, [weight]) for weight in weights] if not problem(device) else []
    except UnsupportedMatrixError:
        tables = []
    return Stored(weights, tables)


def median_times(
    methods: dict[str, Callable[[int], Any]], copies: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """Seconds of each for one copy, the first round not counted."""
    runs = {name: through(method, copies, device) for name, method in methods.items()}
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        order = list(runs.items())
        for name, run in order if number % 2 else reversed(order):
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            if number:
                taken[name].append((time.perf_counter() - start) / copies)
    return {name: statistics.median(times) for name, times in taken.items()}


def through(method: Callable[[int], Any], copies: int, device: torch.device) -> Callable[[], object]:
    """The method for all copies; on a card recorded, if it does not wait for it."""

    def run() -> None:
        for number in range(copies):
            method(number)

    if device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return run
    return graph.replay


def error(stored: Stored, inputs: Tensor) -> str:
    if not stored.tables:
        return "no kernels"
    chosen = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    exact = inputs.double() @ stored.weights[0].dense().double().T
    found = routed(stored.tables[0], chosen, inputs)
    return f"{float((found - exact).norm() / exact.norm()):.0e}"


def cell(stored: Stored, dense: list[Tensor], tokens: int, rounds: int, device: torch.device) -> tuple[str, str]:
    """What the dense product takes, and how many times as fast the others are."""
    outputs, inside = dense[0].shape
    inputs = torch.randn(tokens, inside, device=device).bfloat16()
    chosen, count = torch.zeros(tokens, dtype=torch.int64, device=device), len(dense)
    methods: dict[str, Callable[[int], Any]] = {
        "dense": lambda number: F.linear(inputs, dense[number]),
        "eager": lambda number: stored.weights[number](inputs),
    }
    if stored.tables:
        products = [table.products[0] for table in stored.tables]
        methods["many"] = lambda number: linear(products[number], inputs, outputs)
        if tokens <= MOST_FEW:
            methods["few"] = lambda number: routed(stored.tables[number], chosen, inputs)
    times = median_times(methods, count, rounds, device)
    first = times.pop("dense")
    names = ("few", "many", "eager")
    return f"{first * 1e3:.3f}", " / ".join(f"{first / times[name]:.2f}" if name in times else "–" for name in names)


def rows(shape: tuple[int, int], forms: list[str], rounds: int, device: torch.device) -> Iterator[str]:
    copies = max(1, min(8, CACHE // (2 * shape[0] * shape[1])))
    dense = [torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-0.02, 0.02) for _ in range(copies)]
    taken = []
    for spec in forms:
        stored = store(spec, shape, copies, device)
        cells = [cell(stored, dense, tokens, rounds, device) for tokens in TOKENS]
        taken.append([float(first) for first, _ in cells])
        checked = error(stored, torch.randn(4, shape[1], device=device))
        line = f"| {shape[0]}×{shape[1]} | {spec} | {' | '.join(own for _, own in cells)} | {checked} |"
        print(line, file=sys.stderr, flush=True)
        yield line
    medians = " | ".join(f"{statistics.median(column):.3f} ms" for column in zip(*taken, strict=True))
    yield f"| {shape[0]}×{shape[1]} | dense product | {medians} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small matrices, three rounds")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), help="representations; RANK fits the shape")
    parser.add_argument("--rounds", type=int, help="default: 15, or 3 with --small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    device = torch.device(options.device)
    torch.manual_seed(0)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, "
    threads = "" if device.type == "cuda" else f"{options.threads} threads"
    lines = [
        made_by(f"python {' '.join(sys.argv)}").removesuffix(".") + f", on {named}{threads}.",
        f"Kernels: {problem(device) or 'yes'}. Times as fast as the dense product in bf16, few / many / eager:",
        "",
        f"| out × in | stored | {' | '.join(f'{tokens} tokens' for tokens in TOKENS)} | error |",
        f"|---|---|{'---|' * len(TOKENS)}---|",
    ]
    try:
        for shape in SMALL if options.small else SHAPES:
            lines.extend(rows(shape, options.forms, options.rounds or (3 if options.small else 15), device))
    finally:
        publish(lines, options.output)  # what there is, if the time was up


if __name__ == "__main__":
    main()
