"""One token through the experts of a layer: in one call of the library, against one call per stage and torch between.

    python scripts/benchmarks/one_call.py [--threads 2] [--rounds 16] [--output FILE.md]

Weights, codes and routing are random; some layers follow one another, so that no cache holds the experts. Both ways
take turns, and the least time of each counts, with one thread that of the processor, which other programs prolong less.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from _common import made_by, publish_as_made
from runtime import FORMS, Size, fill, layout, native_layer, routed

from moetool.architectures import MoEShape
from moetool.runtime.modules.experts import SharedBaseExperts

SIZES = [("Qwen3-30B-A3B", Size(2048, 768, 128, 8)), ("Mixtral-8x7B", Size(1024, 3584, 8, 2))]
LAYERS_EACH, TOKENS = 3, 8


def row(family: str, size: Size, form: str, threads: int, rounds: int) -> str:
    """A line of the table."""
    native, clock = native_layer(family, size, torch.device("cpu")), time.thread_time
    if threads > 1:
        clock = time.perf_counter
    layers = []
    for seed in range(LAYERS_EACH):
        shape = MoEShape(size.experts, size.top_k, size.hidden, size.intermediate)
        layers.append(SharedBaseExperts(native, layout(shape, form)).eval())
        layers[-1].config._experts_implementation = "grouped_mm"  # or they would run one after the other
        fill(layers[-1], torch.Generator().manual_seed(seed))
    del native
    tokens = [routed(size, 1, seed, torch.device("cpu")) for seed in range(TOKENS)]
    made = [experts._kernels.of(experts) for experts in layers]
    blocks = [own._block for own in made if own is not None]
    if None in blocks or len(blocks) < LAYERS_EACH:
        raise SystemExit(f"{form} does not run in one call here")

    def seconds(*, in_one: bool) -> float:
        for own, block in zip(made, blocks, strict=True):
            own._block = block if in_one else None
        start = clock()
        for token in tokens:
            for experts in layers:
                experts(*token)
        return (clock() - start) / TOKENS / LAYERS_EACH

    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for in_one in (True, False) if number % 2 else (False, True):
            taken[in_one].append(seconds(in_one=in_one))
    before, now = min(taken[False]), min(taken[True])
    named = f"{size.hidden} × {size.intermediate}, {size.top_k} of {size.experts}"
    return f"| {named} | {form} | {threads} | {before * 1e6:.0f} | {now * 1e6:.0f} | {before / now:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["ders 4 bits", "hybrid 75 %"])
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    head = [
        made_by(f"python {' '.join(sys.argv)}"),
        "",
        "| hidden × intermediate, experts | stored | threads | in stages, µs | in one call, µs | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    rows = (row(*size, form, options.threads, options.rounds) for size in SIZES for form in options.forms)
    publish_as_made(head, rows, options.output)


if __name__ == "__main__":
    main()
