"""Compressed experts in use: their time, memory and error against transformers' own experts in bf16.

    python scripts/benchmarks/runtime.py [--small] [--device cuda] [--output FILE.md]

Single layers have the sizes of Mixtral-8x7B and Qwen3-30B-A3B; their weights, codes, scales and factors are random and
of sensible scale (nothing is encoded), and so are inputs and routing, another for every round. The original is the
fastest of the ways in which transformers runs the same experts in bf16 (`eager`, `batched_mm`, `grouped_mm`; batched_mm
copies an expert's weights for every token, and is left out where these are more than all experts). All take turns;
medians.

`file` is the layer's experts on disk and `in use` by how much the process has grown when they have run, of the
original's bytes; `in use / file` compares the two. Errors are those of the output in bf16 and in fp32, against the
matrices that the stored form stands for in fp32; between them is that of the same matrices in bf16, one expert after
the other.

A whole random Mixtral of .4 B parameters is then written in the same forms, and timed by `moetool bench --against` the
original. Memory there is what the process has allocated when the model is loaded, at most while it loads and at most
ever, and what it has allocated and mapped when it has run, of the bytes on disk.
"""

import argparse
import copy
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import made_by, publish, wait
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moetool.architectures import MoEShape
from moetool.format.entry import format_entry
from moetool.format.layout import LayerLayout
from moetool.job.memory import anonymous_bytes
from moetool.numerics.quantization import levels
from moetool.quiet import quiet
from moetool.representations import Representation, parse_representation
from moetool.runtime.memory import return_freed_memory, return_heap
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.plugin import MoetoolConfig, MoetoolQuantizer

WAYS = ("eager", "batched_mm", "grouped_mm")
GROUP = 128  # inputs that share a scale
DELTA = 0.4  # size of an expert's delta, of its base


class Size(NamedTuple):
    """Of one layer."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


LAYERS = {"Mixtral-8x7B": (MixtralConfig, MixtralExperts), "Qwen3-30B-A3B": (Qwen3MoeConfig, Qwen3MoeExperts)}
SIZES = {"Mixtral-8x7B": Size(4096, 14336, 8, 2), "Qwen3-30B-A3B": Size(2048, 768, 128, 8)}
SMALL = {"Mixtral-8x7B": Size(512, 1792, 8, 2), "Qwen3-30B-A3B": Size(512, 256, 16, 8)}

# How experts are stored: the base, and how many of every eight have which delta; hybrids about as the method chooses.
FORMS: dict[str, tuple[str, dict[str, int]]] = {
    "ders 8 bits": ("dense", {"quantised:8:128": 8}),
    "ders 4 bits": ("dense", {"quantised:4:128": 8}),
    "quantize 4 bits": ("low-rank:0", {"quantised:4:128": 8}),  # to no base
    "hybrid 60 %": ("quantised-weight:2:128", {"quantised:8:128": 4, "quantised:4:128": 4}),
    "hybrid 75 %": (
        "quantised-weight:2:128",
        {"quantised:4:128": 4, "quantised:3:128": 2, "quantised:2:128": 1, "quantised-low-rank": 1},
    ),
    "d2moe, rank share .2": ("dense", {"low-rank": 8}),
}
RANK_SHARE = 0.2  # numbers in the factors, of those in the matrix

# By form: how many times as fast as the original one wants it, for so many tokens.
WANTED: dict[str, dict[int, float]] = {
    "ders 8 bits": {1: 1.4, 8: 1.0, 512: 0.8},
    "ders 4 bits": {1: 1.8, 8: 1.0, 512: 0.8},
    "quantize 4 bits": {1: 3.5, 8: 1.0, 512: 0.8},
    "hybrid 60 %": {1: 1.8, 8: 1.0, 512: 0.8},
    "hybrid 75 %": {1: 2.0, 8: 1.0, 512: 0.8},
    "d2moe, rank share .2": {1: 1.35, 16: 1.8, 512: 1.3},
}
LARGEST = 1.1  # memory in use, of the bytes on disk

HIDDEN, WIDTH, DEPTH = 1024, 1792, 8  # of the whole model, .4 B parameters with 8 experts


def layout(shape: MoEShape, form: str) -> LayerLayout:
    """Gate, up and down alike, with a rank that fits them."""
    base, kinds = FORMS[form]
    rank = round(RANK_SHARE * shape.hidden * shape.intermediate / (shape.hidden + shape.intermediate))
    ranked = {"low-rank": f"low-rank:{rank}", "quantised-low-rank": f"quantised-low-rank:{rank}:3:{GROUP}"}
    named = [ranked.get(kind, kind) for kind, count in kinds.items() for _ in range(count)]
    stored = tuple(parse_representation(named[expert % len(named)]) for expert in range(shape.experts))
    bases = dict.fromkeys(shape.roles, parse_representation(base))
    return LayerLayout(shape, dict.fromkeys(shape.roles, stored), shape.intermediate, base=bases)


def fill_random(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    tensor.uniform_(-std * 3**0.5, std * 3**0.5, generator=generator)  # much faster than a normal variable


def fill_stored(weight: nn.Module, form: Representation, std: float, generator: torch.Generator) -> None:
    """Random tensors, so that elements of the matrix they stand for have about the standard deviation `std`."""
    bits = getattr(form, "bits", None)
    rank = form.directions
    each = std if not rank else (std / rank**0.5) ** 0.5  # of a factor's elements
    for name, tensor in (*weight.named_parameters(), *weight.named_buffers()):
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif name.endswith("scales"):
            spread = levels(int(bits), torch.float32, tensor.device).square().mean().sqrt()  # type: ignore[arg-type]
            tensor.uniform_(0.9 * each / spread, 1.1 * each / spread, generator=generator)
        else:
            fill_random(tensor, each, generator)


@torch.no_grad()
def fill(experts: SharedBaseExperts, generator: torch.Generator) -> None:
    """Every tensor of a layer's experts, with products of about the size of their inputs."""
    stored = experts.layout
    for name in ("gate_up_proj", "down_proj"):
        tensor = getattr(experts, name)
        fill_random(tensor, tensor.shape[-1] ** -0.5, generator)
    for role, form in stored.compact_bases():
        shape = stored.base_shape(role)
        fill_stored(experts.moetool["base"][role], form, shape[1] ** -0.5, generator)  # type: ignore[index]
    for expert, role, form in stored.deltas():
        shape = stored.shape.matrix(role)
        fill_stored(experts.delta(expert, role), form, DELTA * shape[1] ** -0.5, generator)


def native_layer(name: str, size: Size, device: torch.device) -> Any:
    """transformers' experts in bf16, filled with random numbers."""
    config_type, kind = LAYERS[name]
    width = {"intermediate_size": size.intermediate, "moe_intermediate_size": size.intermediate}
    count = {"num_local_experts": size.experts, "num_experts": size.experts, "num_experts_per_tok": size.top_k}
    config = config_type(hidden_size=size.hidden, **width, **count)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module = kind(config)
    module = module.to(torch.bfloat16).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            fill_random(parameter, parameter.shape[-1] ** -0.5, generator)
    return module


def routed(size: Size, tokens: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and their weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size.hidden, generator=generator).bfloat16()
    weights, chosen = torch.rand(tokens, size.experts, generator=generator).topk(size.top_k)
    weights = (weights / weights.sum(1, keepdim=True)).bfloat16()
    return hidden.to(device), chosen.to(device), weights.to(device)


def native_ways(module: Any, size: Size, tokens: int) -> dict[str, Callable[..., Tensor]]:
    def runs(way: str) -> Callable[..., Tensor]:
        def run(*arguments: Tensor) -> Tensor:
            module.config._experts_implementation = way
            return module(*arguments)

        return run

    fitting = [way for way in WAYS if way != "batched_mm" or tokens * size.top_k <= size.experts]
    return {way: runs(way) for way in fitting}


def measure(
    methods: dict[str, Callable[..., Tensor]], size: Size, tokens: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of every method; the first round, which warms up, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        arguments = routed(size, tokens, number, device)
        order = list(methods.items())
        for name, method in order if number % 2 else reversed(order):
            wait(device)
            start = time.perf_counter()
            method(*arguments)
            wait(device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items() if taken}


def reference(experts: SharedBaseExperts, dtype: torch.dtype, *arguments: Tensor) -> Tensor:
    """What the stored matrices give in `dtype`, one expert after the other, added up in fp32."""
    hidden, chosen, weights = arguments
    result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in chosen.unique().tolist():
        rows, choice = torch.where(chosen == expert)
        given = hidden[rows].to(dtype)
        gate, up = (given @ experts.dense(expert, role).to(dtype).T for role in ("gate", "up"))
        own = (experts.act_fn(gate) * up) @ experts.dense(expert, "down").to(dtype).T
        result.index_add_(0, rows, own.float() * weights[rows, choice, None].float())
    return result


def errors(experts: SharedBaseExperts, size: Size) -> tuple[float, float, float]:
    """Of the output as it is computed, of the same matrices in bf16, and of the output in fp32, which `experts` are
    turned into."""
    arguments = routed(size, 4, 99, experts.down_proj.device)
    exact = reference(experts, torch.float32, *arguments)
    found = [experts(*arguments).float(), reference(experts, torch.bfloat16, *arguments)]
    hidden, chosen, weights = arguments
    found.append(experts.float()(hidden.float(), chosen, weights.float()))
    ours, plain, wide = (float((own - exact).norm() / exact.norm()) for own in found)
    return ours, plain, wide


def in_use(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return_heap()
    return anonymous_bytes()


def layer_rows(name: str, size: Size, forms: list[str], rounds: int, device: torch.device) -> Iterator[str]:
    """A line of the table for every form."""
    native = native_layer(name, size, device)
    for tokens in (1, 512):  # what libraries keep once they have run belongs to nobody
        measure(native_ways(native, size, tokens), size, tokens, 0, device)
    for form in forms:
        yield form_row(name, native, size, form, rounds, device)


def form_row(name: str, native: Any, size: Size, form: str, rounds: int, device: torch.device) -> str:
    native_bytes = sum(parameter.nbytes for parameter in native.parameters())
    before = in_use(device)
    ours = SharedBaseExperts(
        native, layout(MoEShape(size.experts, size.top_k, size.hidden, size.intermediate), form)
    ).eval()
    ours.config = copy.deepcopy(native.config)  # of its own: what the native module is told to run by changes
    ours.config._experts_implementation = "grouped_mm"
    fill(ours, torch.Generator(device).manual_seed(1))
    cells = []
    for tokens, wanted in WANTED[form].items():
        methods = native_ways(native, size, tokens) | {"ours": ours}
        taken = measure(methods, size, tokens, rounds if tokens < 64 else max(3, rounds // 3), device)
        mine = taken.pop("ours")
        best = min(taken, key=lambda way: taken[way])
        ratio = taken[best] / mine
        cells.append(f"{ratio:.2f} {_verdict(ratio >= wanted, f'>= {wanted}')} ({best} {taken[best] * 1e3:.2f} ms)")
    grown, file = in_use(device) - before, ours.layout.nbytes(torch.bfloat16)
    off = " | ".join(f"{error:.1e}" for error in errors(ours, size))
    return (
        f"| {name} | {form} | {' | '.join(cells)} | {file / native_bytes:.3f} | {grown / native_bytes:.3f} "
        f"| {grown / file:.2f} {_verdict(grown <= LARGEST * file, f'<= {LARGEST}')} | {off} |"
    )


def _verdict(is_met: bool, wanted: str) -> str:
    return "PASS" if is_met else f"missed {wanted}"


def write_models(work: Path, forms: list[str], depth: int, hidden: int, width: int) -> int:
    """A random Mixtral, and the same sizes in every form; returns how many parameters it has."""
    config = MixtralConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=width, num_hidden_layers=depth,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256 or 1, num_local_experts=8,
        num_experts_per_tok=2, max_position_embeddings=2048, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    shape, parameters = MoEShape(8, 2, hidden, width), 0
    for form in ["original", *forms]:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if form == "original":
            parameters = sum(parameter.numel() for parameter in model.parameters())
        else:
            entry = format_entry(dict.fromkeys(range(depth), layout(shape, form)))
            quantizer = MoetoolQuantizer(MoetoolConfig(**entry))
            quantizer._process_model_before_weight_loading(model)
            for module in model.modules():
                if isinstance(module, SharedBaseExperts):
                    fill(module, torch.Generator().manual_seed(1))
            model.config.quantization_config = quantizer.quantization_config
        with quiet():
            model.save_pretrained(work / form)
        del model
    return parameters


def model_rows(work: Path, form: str, threads: int, rounds: int, length: int, device: str) -> Iterator[str]:
    """Lines of `moetool bench`, a batch each."""
    finished = subprocess.run(
        [sys.executable, "-m", "moetool", "bench", work / form, "--against", work / "original", "--batch", "1,8",
         "--lengths", str(length), "--rounds", str(rounds), "--threads", str(threads), "--synthesize", "on-the-fly",
         "--device", device, "--json"], stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    result = json.loads(finished.stdout)
    ratios, own, other = result["ratios"], result["model"], result["against"]
    loaded, most = ("device_bytes", "device_peak_bytes") if device != "cpu" else ("anonymous_bytes", "peak_bytes")
    for case, base, ratio in zip(own["cases"], other["cases"], ratios["cases"], strict=True):
        yield (
            f"| {form} | {case['batch']} | {ratio['prefill_tokens_per_second']:.2f} of "
            f"{base['prefill_tokens_per_second']:.0f} | {ratio['decode_tokens_per_second']:.2f} of "
            f"{base['decode_tokens_per_second']:.1f} | {ratio['bytes_per_token']:.3f} | {ratios['file_bytes']:.3f} "
            f"| {ratios['weight_bytes']:.3f} | {own[loaded] / own['file_bytes']:.2f} "
            f"| {own['load_peak_bytes'] / own['file_bytes']:.2f} | {own[most] / own['file_bytes']:.2f} "
            f"| {own['unique_bytes'] / own['file_bytes']:.2f} "
            f"| {own['load_seconds']:.1f} s of {other['load_seconds']:.1f} s |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="an eighth of the widths, a small model, three rounds")
    parser.add_argument("--layers", nargs="*", choices=list(SIZES), default=list(SIZES), help="which single layers")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="how experts are stored")
    parser.add_argument("--no-model", action="store_true", help="leave out the whole model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where to compute; memory is then that of the card")
    parser.add_argument("--rounds", type=int, help="default: 15, or 3 with --small")
    parser.add_argument("--work", type=Path, help="where the models are written, to be removed: 3 GB")
    parser.add_argument("--output", type=Path, help="write the tables to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    return_freed_memory()
    device = torch.device(options.device)
    processor = platform.processor() or "CPU"
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    rounds, sizes = options.rounds or (3 if options.small else 15), SMALL if options.small else SIZES
    lines = [
        made_by(f"python {' '.join(sys.argv)}").removesuffix(".") + ",",
        f"{options.threads} threads ({named}, {torch.backends.cpu.get_cpu_capability()}), load "
        f"{os.getloadavg()[0]:.1f}. Above 1 is faster, or more, than the original; in brackets what the original took.",
        "",
    ]
    if options.layers:
        lines += [
            "| layer | stored | decode, batch 1 | batch 8 (d2moe: 16) | prefill 512 | file | in use | in use / file "
            "| error in bf16 | of the matrices | in fp32 |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name in options.layers:
            for row in layer_rows(name, sizes[name], options.forms, rounds, device):
                print(row, file=sys.stderr, flush=True)
                lines.append(row)
            gc.collect()
    if not options.no_model:
        if options.work is not None:
            options.work.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=options.work, prefix="moetool-runtime-"))
        try:
            depth, hidden, width, length = (2, 256, 512, 64) if options.small else (DEPTH, HIDDEN, WIDTH, 512)
            parameters = write_models(work, options.forms, depth, hidden, width)
            lines += [
                "",
                f"A Mixtral of {parameters / 1e6:.0f} M parameters, prompts of {length} tokens, tokens per second:",
                "",
                "| stored | batch | prefill | decode | bytes / token | file | weights | loaded / file | loading / file "
                "| most / file | with mapped / file | load |",
                "|---|---|---|---|---|---|---|---|---|---|---|---|",
            ]
            for form in options.forms:
                for row in model_rows(work, form, options.threads, max(3, rounds // 3), length, options.device):
                    print(row, file=sys.stderr, flush=True)
                    lines.append(row)
        finally:
            shutil.rmtree(work)
    publish(lines, options.output)


if __name__ == "__main__":
    main()
