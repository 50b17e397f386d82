"""Sparse interpolated experts (SIMoE): the time of a generated token, with and without folded weights, against the
dense model.

    python scripts/benchmarks/folding.py [--quick] [--output FILE.md]

The prompt and what is not folded yet are included. One thread, interleaved, medians of process_time. Weights, masks
and router are random; an eighth of each mask is open, which leaves about two thirds of the channels to some mask.
"""

# ruff: noqa: E402  (the thread counts must be set before the libraries are loaded)

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import made_by, publish
from transformers import LlamaConfig, LlamaForCausalLM

from moetool.numerics.hard_concrete import SHIFT
from moetool.runtime.modules.simoe import insert, sites
from moetool.runtime.modules.simoe_mixing import interpolation_of

PROMPT, EXPERTS, OPEN = 16, 8, 0.125


def models(hidden: int, layers: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """A dense model, and one with experts, as training leaves it."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        vocab_size=1024,
    )
    dense = LlamaForCausalLM(config).to(dtype).eval()
    model = copy.deepcopy(dense)
    described = {"experts": EXPERTS, "router_width": 64, "sparsity": 1 - OPEN, "channels": None}
    insert(model, {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, described)
    for site in sites(model).values():
        site.delta.normal_(std=0.01)
        is_open = torch.rand(site.log_phi.shape) < OPEN
        site.log_phi.copy_(is_open.float() - SHIFT - 0.5)
        site.prune()
    interpolation: Any = interpolation_of(model)
    interpolation.trains_masks = False
    return dense, model.to(dtype).eval()


def seconds(model: Any, tokens: int) -> float:
    """Of a generated token, its share of the prompt included."""
    prompt = torch.arange(1, PROMPT + 1)[None]
    start = time.process_time()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return (time.process_time() - start) / tokens


def row(sizes: tuple[int, int], dtype: torch.dtype, tokens: int, repeats: int) -> str:
    dense, model = models(*sizes, dtype)
    interpolation: Any = interpolation_of(model)
    times: dict[str, list[float]] = {"dense": [], "unfolded": [], "folded": []}
    for round_ in range(repeats + 1):
        for name, taken in times.items():
            interpolation.folds = name == "folded"
            found = seconds(dense if name == "dense" else model, tokens)
            if round_:  # the first warms up
                taken.append(found)
    unit = statistics.median(times["dense"])
    told = [f"{statistics.median(times[name]) / unit:.2f}" for name in ("unfolded", "folded")]
    kept = statistics.mean(len(site.columns) / site.in_features for site in sites(model).values())
    return f"| {str(dtype).removeprefix('torch.')} | {tokens} | {kept:.0%} | {1 / unit:.1f} | {told[0]} | {told[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and three repetitions")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sizes, repeats = ((256, 2), 3) if options.quick else ((1024, 6), 5)
    lines = [
        made_by(f"python {' '.join(sys.argv)}"),
        f"Llama of {sizes[1]} layers, hidden {sizes[0]}, {EXPERTS} experts, a prompt of {PROMPT} tokens; one thread, "
        f"load {os.getloadavg()[0]:.1f}; time of a token / time of the dense model's.",
        "",
        "| dtype | tokens | channels kept | dense, tokens/s | two products | folded |",
        "|---|---|---|---|---|---|",
        *(row(sizes, dtype, tokens, repeats) for dtype in (torch.float32, torch.bfloat16) for tokens in (16, 64, 256)),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
