"""`moetool compress` on single decoder layers of real width: time by phase, peak memory, scratch.

    python scripts/benchmarks/real_widths.py

Writes models of one layer with random experts around a mean, as wide as Mixtral-8x7B's and Qwen3-30B-A3B's, compresses
them through the command line, and prints what each phase took, beside what `--dry-run` had told.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _common import made_by, publish, write_random_text, write_tokenizer
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 1, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS = {
    "Mixtral-8x7B": MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_local_experts=8,
        num_experts_per_tok=2, **COMMON,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, head_dim=128,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, **COMMON,
    ),
    "1024 x 3584": MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_attention_heads=16, num_key_value_heads=4, num_local_experts=8,
        num_experts_per_tok=2, **COMMON,
    ),
}  # fmt: skip
METHODS = {"d2moe": ("d2moe", "0.4"), "hybrid": ("hybrid", "0.75")}


def write_model(directory: Path, config: Any) -> int:
    """A random model in bf16 whose experts are a common matrix and a quarter of their own; returns its parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:
                mean = torch.randn(parameter.shape[1:]) * 0.02
                for own in parameter:
                    own.copy_(mean + torch.randn(mean.shape) * 0.005)
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCABULARY)
    return sum(parameter.numel() for parameter in model.parameters())


class Scratch:
    """The most bytes that were below a directory, looked at again and again."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._ends, self.most = directory, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ends.wait(0.2):
            total = 0
            for path in self._directory.rglob("*"):
                try:
                    total += path.stat().st_size
                except OSError:
                    continue
            self.most = max(self.most, total)

    def __enter__(self) -> "Scratch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def compressed(work: Path, method: str, ratio: str, samples: int, length: int) -> dict[str, Any]:
    """What a run of the command line tells, and was seen to take."""
    command = [
        sys.executable, "-m", "moetool", "compress", str(work / "model"), str(work / "out"), "--method", method,
        "--ratio", ratio, "--calibration", str(work / "text.txt"), "--mix", "0", "--samples", str(samples),
        "--sequence-length", str(length), "--json",
    ]  # fmt: skip
    told = json.loads(subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout)
    shutil.rmtree(work / "out", ignore_errors=True)
    began = time.monotonic()
    with Scratch(work / "out" / ".moetool") as scratch:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - began
    return {**json.loads(run.stdout), "told": told, "seconds": seconds, "scratch": scratch.most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS)[:2], choices=list(CONFIGS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-widths")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokens = options.samples * options.sequence_length
    lines = [
        f"{made_by('python scripts/benchmarks/real_widths.py')} {torch.get_num_threads()} threads, {tokens:,} tokens.",
        "",
        "| layer | method | parameters | phases | in all (told) | peak memory (told) | scratch (told) | size |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in options.models:
        shutil.rmtree(options.work, ignore_errors=True)
        parameters = write_model(options.work / "model", CONFIGS[name])
        write_random_text(options.work / "text.txt", VOCABULARY, 2 * tokens)
        for method in options.methods:
            found = compressed(options.work, *METHODS[method], options.samples, options.sequence_length)
            told = found["told"]
            phases = ", ".join(f"{phase['name']} {phase['seconds']:,.0f} s" for phase in found["phases"])
            lines.append(
                f"| {name} | `{method}` | {parameters / 1e6:,.0f} M "
                f"| {phases} "
                f"| {found['seconds']:,.0f} s ({told.get('seconds', float('nan')):,.0f}) "
                f"| {found['peak_memory_bytes'] / 1e9:.1f} GB ({told['peak_memory_bytes'] / 1e9:.1f}) "
                f"| {found['scratch'] / 1e9:.2f} GB ({told['scratch_bytes'] / 1e9:.2f}) "
                f"| {found['bytes_after'] / found['bytes_before']:.3f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    shutil.rmtree(options.work, ignore_errors=True)
    publish(lines, options.output)


if __name__ == "__main__":
    main()
