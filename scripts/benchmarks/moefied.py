"""Neurons as experts (G-MoEfication): the time of a feed-forward network that skips experts, against the dense one.

    python scripts/benchmarks/moefied.py [--quick] [--output FILE.md]

Projection, selector, constant and all else included. One thread, interleaved, medians of process_time (of the clock on
CUDA); the networks have weights of their own, more than the last cache holds unless --quick. Weights, inputs and
selectors are random, so neighbouring experts are as rarely selected together as they can be. Wanted of a selector at
one token: at most the share that is kept and a tenth of the dense network's time more. A projection is computed whole.
"""

# ruff: noqa: E402  (the thread counts must be set before the libraries are loaded)

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from _common import processor, publish, race
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.format.kinds.moefied import Lead, MoefiedSpec, SelectorKind
from moetool.runtime.modules.led_neurons import LedNeurons
from moetool.runtime.modules.neuron_experts import NeuronExperts

KEEPS, TOKENS, MARGIN = (0.25, 0.5, 0.75), (1, 4, 16, 256), 0.1
SELECTORS: tuple[SelectorKind, ...] = ("projection", "mlp", "fixed")


class FFN(nn.Module):
    """SwiGLU without biases, or GELU with them."""

    def __init__(self, hidden: int, intermediate: int, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False) if gated else None
        self.up = nn.Linear(hidden, intermediate, bias=not gated)
        self.down = nn.Linear(intermediate, hidden, bias=not gated)
        self.act_fn = F.silu if gated else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.act_fn(self.up(x)))
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


def moefied(ffn: FFN, experts: int, selector: SelectorKind) -> NeuronExperts:
    roles = ("up", "down") if ffn.gate is None else ("gate", "up", "down")
    intermediate, hidden = ffn.up.weight.shape
    is_led, lead = selector == "projection", cast(Lead, roles[-2])
    described = MoefiedSpec(
        layers=(0,),
        experts=intermediate if is_led else experts,
        keep=0.5,
        selector=selector,
        leads=(lead,) if is_led else (),
    )
    names: Any = {role: role for role in roles}
    build = LedNeurons if is_led else NeuronExperts
    made = build(copy.deepcopy(ffn), names, ffn.act_fn, hidden, intermediate, described, None, described.lead(0)).eval()
    made.centre.normal_(std=0.1)
    if selector == "fixed":
        made.order.copy_(torch.randperm(experts))
    elif selector == "mlp":
        for parameter in made.selector.parameters():
            parameter.normal_()
    return made


def rows_of(device: torch.device, sizes: tuple[int, int, int], repeats: int) -> list[str]:
    hidden, intermediate, experts = sizes
    rows = []
    for gated in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            dense = FFN(hidden, intermediate, gated).to(device, dtype).eval()
            for tokens in TOKENS:
                # Networks of their own for every number of tokens: decoding leaves the down matrix transposed.
                inputs = torch.randn(tokens, hidden, device=device).to(dtype)
                ours = {name: moefied(dense, experts, name) for name in SELECTORS}
                for keep in KEEPS:
                    for module in ours.values():
                        module.set_keep(keep)
                    methods: dict[str, Callable[[], object]] = {"dense": lambda x=inputs, run=dense: run(x)}
                    methods |= {name: lambda x=inputs, run=run: run(x) for name, run in ours.items()}
                    taken, _ = race(methods, repeats if tokens < 64 else max(3, repeats // 3), device)
                    unit = statistics.median(taken["dense"])
                    ratios = {name: statistics.median(times) / unit for name, times in taken.items()}
                    rounds = [a / b for a, b in zip(taken["mlp"], taken["dense"], strict=True)]
                    low, high = min(rounds), max(rounds)
                    verdict = "" if tokens > 1 else "PASS" if ratios["mlp"] <= keep + MARGIN else "missed"
                    rows.append(
                        f"| {device.type} | {'SwiGLU' if gated else 'GELU'} | {str(dtype).removeprefix('torch.')} "
                        f"| {tokens} | {keep:.0%} | {unit * 1e3:.2f} ms "
                        f"| {ratios['projection']:.2f} | {ratios['mlp']:.2f} ({low:.2f} to {high:.2f}) "
                        f"| {ratios['fixed']:.2f} | {f'<= {keep + MARGIN:.2f}' if tokens == 1 else ''} | {verdict} |"
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the weights and three repetitions")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sizes, repeats = ((512, 2048, 16), 3) if options.quick else ((2048, 8192, 64), 21)
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    lines = [
        f"Made by `python {' '.join(sys.argv)}` with torch {torch.__version__},",
        f"one thread of {processor()} ({torch.backends.cpu.get_cpu_capability()}), load {os.getloadavg()[0]:.1f}.",
        f"Hidden {sizes[0]}, {sizes[1]} neurons, {sizes[2]} experts; time / time of the dense network.",
        "",
        "| device | network | dtype | tokens | keep | dense | projection | selector (rounds) | fixed | wanted | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row for device in devices for row in rows_of(device, sizes, repeats)),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
