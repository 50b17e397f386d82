"""Products of a token or a few with codes, rounded to whole numbers or not: what that saves, and what it costs.

    python scripts/benchmarks/rounding.py [--threads 2] [--tokens 4] [--original DIR --text FILE.txt --models DIR …]
        [--output FILE]

Matrices are random. Both ways take turns, through copies of a matrix that are more than a cache holds; the least time
of each counts, with one thread that of the processor, which other programs prolong less. Bandwidth is that of a copy,
read and written bytes together, which takes turns with them, too. The price is the divergence from the original's next
tokens in nats, of compressed models of it, and that between both ways, with all tokens as few.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import made_by, publish
from kernels import store
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import moetool  # noqa: F401  compressed models load
from moetool.kernels.products import routed
from moetool.kernels.rounding import exact_products
from moetool.runtime.modules import inference

SHAPES = ((2048, 768), (4096, 14336), (7168, 4096))  # out and in
BITS = (1, 2, 3, 4, 5, 6, 8)
CACHE = 1 << 26  # bytes of codes that are gone through
COPIED = 1 << 25  # numbers of fp32
ROUNDS = 9
LENGTH = 256  # tokens of a window


def timer(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def speed_rows(threads: int, tokens: int) -> list[str]:
    """A line for every shape and number of bits."""
    clock, source = timer(threads), torch.rand(COPIED)
    target, lines = torch.empty_like(source), []
    for shape, bits in itertools.product(SHAPES, BITS):
        spec = f"quantised-weight:{bits}:128"
        count = min(64, max(2, 8 * CACHE // (bits * shape[0] * shape[1])))
        stored = store(spec, shape, count, torch.device("cpu"))
        size = sum(tensor.nbytes for tensor in (*stored.weights[0].parameters(), *stored.weights[0].buffers()))
        inputs, chosen = torch.randn(tokens, shape[1]), torch.zeros(tokens, dtype=torch.int64)

        def go(tables: list = stored.tables, chosen: Tensor = chosen, inputs: Tensor = inputs) -> float:
            start = clock()
            for table in tables:
                routed(table, chosen, inputs)
            return (clock() - start) / len(tables)

        exact, rounded, copied = [], [], []
        for _ in range(ROUNDS):
            with exact_products():
                exact.append(go())
            rounded.append(go())
            start = clock()
            target.copy_(source)
            copied.append(clock() - start)
        bandwidth, before, now = 8 * COPIED / min(copied), min(exact), min(rounded)
        times = f"{before * 1e6:.0f} | {now * 1e6:.0f} | {before / now:.2f}"
        rates = f"{size / before / 1e9:.1f} | {size / now / 1e9:.1f} | {bandwidth / 1e9:.1f}"
        lines.append(f"| {shape[0]} × {shape[1]} | {bits} | {times} | {rates} | {size / now / bandwidth:.2f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def divergence(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean().double())


def price_rows(original: Path, models: list[Path], text: Path, windows: int) -> list[str]:
    """A line for every model."""
    ids = AutoTokenizer.from_pretrained(original)(text.read_text()[: 8 * windows * LENGTH])["input_ids"]
    ids, lines = torch.tensor(ids[: windows * LENGTH]).view(windows, 1, LENGTH), []
    native = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    right = [native(window).logits.log_softmax(-1) for window in ids]
    inference._FEW = 1 << 30  # or so many tokens would be multiplied by what is unpacked
    for path in models:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        found = []
        for window, expected in zip(ids, right, strict=True):
            with exact_products():
                exact = model(window).logits.log_softmax(-1)
            rounded = model(window).logits.log_softmax(-1)
            found.append([divergence(expected, exact), divergence(expected, rounded), divergence(exact, rounded)])
        before, now, between = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
        lines.append(f"| {path.name} | {before:.6f} | {now:.6f} | {between:.1e} | {between / before:.2%} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="that meet a matrix together")
    parser.add_argument("--no-speed", action="store_true", help="the price alone")
    parser.add_argument("--original", type=Path, help="what the models were compressed from")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="compressed models")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--output", type=Path, help="write the tables to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    command = f"python {' '.join(argument for argument in sys.argv if '/' not in argument or 'scripts' in argument)}"
    lines = [made_by(command), ""]
    if not options.no_speed:
        lines += [
            f"{options.threads} thread(s):",
            "",
            "| out × in | bits | exact, µs | rounded, µs | times as fast | exact, GB/s | rounded | a copy | share |",
            "|---|---|---|---|---|---|---|---|---|",
            *speed_rows(options.threads, options.tokens),
            "",
        ]
    if options.models:
        lines += [
            "| model | KL to the original, exact | rounded | KL of rounded to exact | of what codes lose |",
            "|---|---|---|---|---|",
            *price_rows(options.original, options.models, options.text, options.windows),
        ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
