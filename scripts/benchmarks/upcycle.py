"""Upcycling: how exact it is, how its routers share out the tokens, and the memory it takes.

    python scripts/benchmarks/upcycle.py --model DENSE --data TEXT

Three tables. (1) Tiny random models of every dense family to every target that can express them, top-1, top-2 and top-3
of 4 experts: ‖Δ logits‖ / ‖logits‖ in fp32 after saving and loading with transformers, no key missing or left over.
(2) The least and largest share of the tokens of TEXT that any expert of any layer of DENSE gets, over seeds, with and
without centred routers. (3) Peak memory against the number of layers and experts.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import made_by, publish
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import moetool  # noqa: F401  (lets transformers load custom MoE models)
from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.errors import InvalidInputError
from moetool.job.execute import run_stage
from moetool.job.result import Result
from moetool.quiet import quiet
from moetool.stages import stages
from moetool.upcycle.targets import targets

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))
from dense_families import DENSE_FAMILIES, build_dense

EXPERTS = 4


def upcycle(source: Path, output: Path, **options: Any) -> Result:
    shutil.rmtree(output, ignore_errors=True)
    chosen = stages()["vanilla"].options_type.model_validate(options)
    return run_stage(stages()["vanilla"], source, output, chosen)


@torch.no_grad()
def reload_error(output: Path, tokens: torch.Tensor, dense: torch.Tensor) -> float:
    """Relative error of the logits of what was saved; fails if a key is missing or left over."""
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True, dtype=torch.float32)
    if any(info.values()):
        raise SystemExit(f"{output}: {info}")
    return ((model.eval()(input_ids=tokens).logits - dense).norm() / dense.norm()).item()


def exactness(work: Path) -> list[str]:
    lines = ["| source | target | shared | top-1 | top-2 | top-3 |", "|---|---|---|---|---|---|"]
    worst = 0.0
    for family in DENSE_FAMILIES:
        model = build_dense(family)
        with quiet():
            model.save_pretrained(work / family)
        tokens = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            dense = model(input_ids=tokens).logits
        for target in targets():
            for shared in ("none", "half", "xft"):
                errors = []
                for top_k in (1, 2, 3):
                    try:
                        upcycle(
                            work / family, work / "out",
                            experts=EXPERTS, top_k=top_k, target=target, shared=shared, proof=False,
                        )  # fmt: skip
                    except InvalidInputError:
                        break
                    errors.append(reload_error(work / "out", tokens, dense))
                if errors:
                    worst = max(worst, *errors)
                    cells = " | ".join(f"{error:.1e}" for error in errors)
                    lines.append(f"| {family} | {target} | {shared} | {cells} |")
    return [*lines, "", f"Worst of all: {worst:.1e}."]


@torch.no_grad()
def shares(output: Path, windows: torch.Tensor) -> torch.Tensor:
    """`[layers, experts]`: the part of the assignments that each expert gets."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    counts = torch.zeros(model.config.num_hidden_layers, experts)
    for rows in windows.split(8):
        for layer, logits in enumerate(model(input_ids=rows, output_router_logits=True).router_logits):
            counts[layer] += torch.bincount(logits.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    return counts / counts.sum(1, keepdim=True)


def routing(work: Path, model: Path, data: Path, calibration: Path, seeds: int) -> list[str]:
    windows = evaluation_windows(str(data), load_tokenizer(model), sequence_length=256, limit=64)
    lines = [
        f"{windows.numel()} tokens, all layers together; goal: between 0.5 and 2 times 1/E.",
        "",
        "| experts | top-k | routers | least share × E | largest share × E | seeds within the goal |",
        "|---|---|---|---|---|---|",
    ]
    for experts, top_k in ((8, 2), (8, 1), (16, 2)):
        for centred in (False, True):
            least, largest, good = [], [], 0
            for seed in range(seeds):
                text = {"calibration": str(calibration), "mix": 0, "center_router": True} if centred else {}
                upcycle(
                    model, work / "out",
                    experts=experts, top_k=top_k, seed=seed, proof=False, target="mixtral", **text,
                )  # fmt: skip
                found = shares(work / "out", windows) * experts
                least.append(found.min().item())
                largest.append(found.max().item())
                good += least[-1] >= 0.5 and largest[-1] <= 2
            kind = "centred" if centred else "random"
            lines.append(
                f"| {experts} | {top_k} | {kind} | {min(least):.2f} (median {sorted(least)[seeds // 2]:.2f}) "
                f"| {max(largest):.2f} (median {sorted(largest)[seeds // 2]:.2f}) | {good} of {seeds} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def memory(work: Path) -> list[str]:
    lines = ["| layers | experts | proof | output | peak memory | seconds |", "|---|---|---|---|---|---|"]
    for layers in (2, 4, 8, 16):
        config = LlamaConfig(
            vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=512,
        )  # fmt: skip
        shutil.rmtree(work / "wide", ignore_errors=True)
        with quiet():
            LlamaForCausalLM(config).bfloat16().save_pretrained(work / "wide")
        for experts in (2, 8, 32) if layers == 4 else (8,):
            for proof in (True, False):
                shutil.rmtree(work / "out", ignore_errors=True)
                finished = subprocess.run(
                    [sys.executable, "-c", "from moetool.cli import main; main()", "upcycle", work / "wide",
                     work / "out", "--experts", str(experts), "--proof" if proof else "--no-proof", "--json"],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
                )  # fmt: skip
                result = json.loads(finished.stdout)
                lines.append(
                    f"| {layers} | {experts} | {'yes' if proof else 'no'} | {result['bytes_after'] / 1e9:.2f} GB "
                    f"| {result['peak_memory_bytes'] / 1e6:.0f} MB | {result['seconds']:.0f} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, "", "One layer of the dense model is 61 MB in fp32, one expert 50 MB, torch itself about 180 MB."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="A dense model with a tokenizer.")
    parser.add_argument("--data", type=Path, required=True, help="Text to count shares on.")
    parser.add_argument("--calibration", type=Path, required=True, help="Other text, to centre routers on.")
    parser.add_argument("--tables", nargs="+", default=["exactness", "routing", "memory"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-upcycle")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    parts = [
        made_by("python scripts/benchmarks/upcycle.py --model DENSE --data TEST --calibration VALIDATION"),
    ]
    if "exactness" in options.tables:
        parts += ["", "## Exactness", "", *exactness(options.work)]
    if "routing" in options.tables:
        text = (options.model, options.data, options.calibration)
        parts += ["", "## Shares of the tokens", "", *routing(options.work, *text, options.seeds)]
    if "memory" in options.tables:
        parts += ["", "## Memory", "", *memory(options.work)]
    shutil.rmtree(options.work, ignore_errors=True)
    publish(parts, options.output)


if __name__ == "__main__":
    main()
