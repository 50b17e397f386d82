"""Differences in few bits and few numbers: bytes against theory, quality against rates, and all methods at equal bytes.

    python scripts/benchmarks/ders.py MODEL --base DENSE --calibration VALID.txt --data TEST.txt

MODEL's experts were upcycled from DENSE. Every checkpoint is made by the command line, evaluated and removed. Excess is
the log of the perplexity ratio to the original.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import Kept, excess, made_by
from safetensors.torch import load_file, save_file

from moetool.job.job import Source

DROPS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
BITS = (8, 4, 3, 2, 1)
GROUP = 128


def moetool(*arguments: object) -> dict[str, Any]:
    """The JSON a command prints."""
    command = [sys.executable, "-m", "moetool", *map(str, arguments), "--json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(command)}\n{finished.stderr}")
    return json.loads(finished.stdout)


class Bench:
    """Makes models, evaluates them and remembers what came of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.text = ("--calibration", options.calibration, "--mix", 0, "--samples", 64, "--sequence-length", 256)
        settings = [options.model, options.base, options.calibration, options.data, str(options.windows)]
        digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:12]
        self.kept = Kept(options.work / f"scores-{digest}.jsonl")
        self.original = self.kept.get("original", lambda: self._score(options.model))["perplexity"]

    def _score(self, path: Path | str) -> dict[str, Any]:
        data = ("--data", self.options.data, "--sequence-length", 256, "--windows", self.options.windows)
        return {"perplexity": moetool("eval", path, *data)["perplexity"]}

    def run(self, *steps: tuple[object, ...]) -> dict[str, Any]:
        """The result of `compress`, or of several stages one after the other: bytes saved, perplexity, tensors."""
        key = " | ".join(" ".join(map(str, step)) for step in steps)

        def make() -> dict[str, Any]:
            source: Path | str = self.options.model
            target = self.options.work / "model"
            for number, (command, *rest) in enumerate(steps):
                target = self.options.work / f"model-{number}"
                shutil.rmtree(target, ignore_errors=True)
                made = moetool(command, source, target, *rest)
                source = target
            stored = load_file(target / "model.safetensors")
            sizes = dict.fromkeys(("values", "codes", "scales", "low", "high", "mask"), 0)
            for name, tensor in stored.items():
                if name.rsplit(".", 1)[-1] in sizes and ".base." not in name:
                    sizes[name.rsplit(".", 1)[-1]] += tensor.nbytes
            return {"saved": made["achieved_ratio"], "sizes": sizes, **self._score(target)}

        result = self.kept.get(key, make)
        print(f"{key}: {result['saved']:.4f} {result['perplexity']:.4f}", file=sys.stderr, flush=True)
        return result

    def rounded(self, bits: int) -> dict[str, Any]:
        """Every expert rounded to the nearest of 2^bits steps up to its group's largest number, without a base."""

        def make() -> dict[str, Any]:
            source = Source.open(self.options.model)
            target = self.options.work / "rounded"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(self.options.model, target)
            tensors = load_file(target / "model.safetensors")
            saved = 0.0
            for name in source.experts.names:
                groups = tensors[name].float().view(-1, GROUP)
                top = 2 ** (bits - 1) - 1
                scales = (groups.abs().amax(1, keepdim=True) / top).bfloat16().float()
                codes = (groups / scales).round().clamp(-top, top)
                tensors[name] = (codes * scales).view(tensors[name].shape).to(tensors[name].dtype)
                saved += groups.numel() * (2 - bits / 8 - 2 / GROUP)
            save_file(tensors, target / "model.safetensors", {"format": "pt"})
            return {"saved": saved / source.checkpoint.weight_bytes, **self._score(target)}

        return self.kept.get(f"rounded {bits}", make)

    def without_base(self, bits: int) -> dict[str, Any]:
        """Every expert by itself in our own codes, chosen on the text."""
        return self.run(("compress", "--method", "quantize", "--bits", bits, *self.text))

    def row(self, name: str, result: dict[str, Any]) -> str:
        loss = excess(result["perplexity"], self.original)
        return f"| {name} | {result['saved']:.2%} | {result['perplexity']:.4f} | {loss:.5f} |"


HEADER = ["| | bytes saved | perplexity | excess loss |", "|---|---|---|---|"]


def sizes(bench: Bench) -> list[str]:
    """Bytes of all differences together against theory and against the usual ways to store indices."""
    source = Source.open(bench.options.model)
    shape = source.experts.shape
    numbers = 3 * shape.experts * shape.hidden * shape.intermediate * len(source.experts.moe_layers)
    rows = ["| setting | theory | ours | bitmask | int32 indices |", "|---|---|---|---|---|"]
    for drop in (0.5, 0.8, 0.9, 0.95, 0.99):
        result = bench.run(("compress", "--method", "ders-sparsify", "--drop", drop))
        theory = 2 * numbers * (1 - drop)
        mask, indices = theory + numbers / 8, theory + 4 * numbers * (1 - drop)
        ours = sum(result["sizes"].values())
        rows.append(
            f"| drop {drop} | {theory:,.0f} | {ours:,} ({ours / theory - 1:+.3%}) | {mask:,.0f} | {indices:,.0f} |"
        )
    for bits in BITS:
        result = bench.run(("compress", "--method", "ders-quantize", "--bits", bits))
        theory = numbers * bits / 8 + 2 * numbers / GROUP
        ours = sum(result["sizes"].values())
        rows.append(f"| {bits} bits, groups of {GROUP} | {theory:,.0f} | {ours:,} ({ours / theory - 1:+.3%}) | - | - |")
    return rows


def rates(bench: Bench) -> list[str]:
    """Perplexity against drop rate and bits, to the true base and to the mean (Figures 4 to 6)."""
    rows = list(HEADER)
    for name, base in (("true base", bench.options.base), ("mean", "mean")):
        for drop in DROPS:
            result = bench.run(("compress", "--method", "ders-sparsify", "--base", base, "--drop", drop))
            rows.append(bench.row(f"{name}, drop {drop} at random", result))
        for drop in (0.8, 0.9, 0.95):
            options = ("--method", "ders-sparsify", "--base", base, "--select", "magnitude", "--drop", drop)
            rows.append(bench.row(f"{name}, drop the smallest {drop}", bench.run(("compress", *options))))
        for bits in BITS:
            result = bench.run(("compress", "--method", "ders-quantize", "--base", base, "--bits", bits))
            rows.append(bench.row(f"{name}, {bits} bits", result))
    return rows


def equal_bytes(bench: Bench) -> list[str]:
    """Every method as near to each ratio as its settings allow."""
    text = bench.text
    quantize = ("compress", "--method", "ders-quantize")

    def low_rank(rank: int, bits: int) -> list[tuple[object, ...]]:
        return [("compress", "--method", "d2moe", "--rank", rank, *text), ("quantize-delta", "--bits", bits, *text)]

    blocks: dict[float, dict[str, Callable[[], dict[str, Any]]]] = {
        0.40: {
            "d2moe": lambda: bench.run(("compress", "--method", "d2moe", "--ratio", 0.4, *text)),
            "plain 8 bits": lambda: bench.rounded(8),
            "base + 8 bits": lambda: bench.run((*quantize, "--bits", 8, "--base-bits", 8)),
            "ders-sparsify, drop .627 smallest": lambda: bench.run(
                ("compress", "--method", "ders-sparsify", "--select", "magnitude", "--drop", 0.627)
            ),
            "ders-sparsify, drop .49 at random": lambda: bench.run(
                ("compress", "--method", "ders-sparsify", "--drop", 0.49)
            ),
            "hybrid": lambda: bench.run(("compress", "--method", "hybrid", "--ratio", 0.4, *text)),
        },
        0.60: {
            "d2moe": lambda: bench.run(("compress", "--method", "d2moe", "--ratio", 0.6, *text)),
            "plain 4 bits": lambda: bench.rounded(4),
            "base + 4 bits": lambda: bench.run((*quantize, "--bits", 4, "--base-bits", 8)),
            "base + 4 bits, rounded on text": lambda: bench.run((*quantize, "--bits", 4, "--base-bits", 8, *text)),
            "low-rank 120 in 8 bits": lambda: bench.run(*low_rank(120, 8)),
            "no base, 4 bits on text": lambda: bench.without_base(4),
            "hybrid": lambda: bench.run(("compress", "--method", "hybrid", "--ratio", 0.62, *text)),
        },
        0.74: {
            "d2moe": lambda: bench.run(("compress", "--method", "d2moe", "--ratio", 0.74, *text)),
            "plain 3 bits": lambda: bench.rounded(3),
            "plain 2 bits": lambda: bench.rounded(2),
            "no base, 3 bits on text": lambda: bench.without_base(3),
            "no base, 2 bits on text": lambda: bench.without_base(2),
            "4-bit base + 2 bits": lambda: bench.run((*quantize, "--bits", 2, "--base-bits", 4)),
            "4-bit base + 2 bits, groups of 64": lambda: bench.run(
                (*quantize, "--bits", 2, "--base-bits", 4, "--group-size", 64)
            ),
            "4-bit base + 2 bits, groups of 64, rounded on text": lambda: bench.run(
                (*quantize, "--bits", 2, "--base-bits", 4, "--group-size", 64, *text)
            ),
            "low-rank 90 in 4 bits": lambda: bench.run(*low_rank(90, 4)),
            "hybrid": lambda: bench.run(("compress", "--method", "hybrid", "--ratio", 0.74, *text)),
        },
        0.81: {
            "4-bit base + 1 bit": lambda: bench.run((*quantize, "--bits", 1, "--base-bits", 4)),
            "4-bit base + 1 bit, rounded on text": lambda: bench.run((*quantize, "--bits", 1, "--base-bits", 4, *text)),
            "4-bit base + .95 dropped, smallest": lambda: bench.run(
                ("compress", "--method", "ders-sparsify", "--select", "magnitude", "--drop", 0.95, "--base-bits", 4)
            ),
            "hybrid": lambda: bench.run(("compress", "--method", "hybrid", "--ratio", 0.81, *text)),
        },
        0.85: {
            "4-bit base + .98 dropped, smallest": lambda: bench.run(
                ("compress", "--method", "ders-sparsify", "--select", "magnitude", "--drop", 0.98, "--base-bits", 4)
            ),
            "hybrid": lambda: bench.run(("compress", "--method", "hybrid", "--ratio", 0.85, *text)),
        },
    }
    rows = []
    chosen = bench.options.rows
    for ratio, block in blocks.items():
        named = {name: make for name, make in block.items() if not chosen or any(part in name for part in chosen)}
        if named:
            rows += ["", f"About {ratio:.0%} smaller:", "", *HEADER]
            rows += [bench.row(name, make()) for name, make in named.items()]
    return rows


TABLES = {"sizes": sizes, "rates": rates, "equal-bytes": equal_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--base", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rows", nargs="+", metavar="PART", help="of equal-bytes, only rows with this in their name")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-ders")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    bench = Bench(options)
    parts = [f"Original: perplexity {bench.original:.4f} on the first {options.windows} windows of 256 tokens."]
    for name in options.only:
        parts += ["", f"## {(TABLES[name].__doc__ or '').splitlines()[0]}", "", *TABLES[name](bench)]
    table = "\n".join(parts)
    print(table)
    if options.output:
        command = "python scripts/benchmarks/ders.py MODEL --base DENSE --calibration VALID --data TEST"
        command += f" --only {' '.join(options.only)}" if options.only != list(TABLES) else ""
        command += f" --rows {' '.join(map(repr, options.rows))}" if options.rows else ""
        options.output.write_text(f"{made_by(command)}\n\n{table}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
