"""Perplexity of moefied models by the share of experts kept, for every way to choose them.

    python scripts/benchmarks/moefy.py MODEL CALIBRATION.txt TEST.txt [--experts 64] [--seeds 3] [--output FILE.md]

MODEL is dense, a decoder or an encoder (pseudo-perplexity). Nothing is trained but the selectors. `random` and `SNIP`
keep the representative values of what they leave out, as in Table 3 of G-MoEfication; the oracle knows every expert's
true contribution and is no faster than the dense model. A seed decides clusters, calibration windows, selectors and
what is random. All rows but the first are made `--as-published`: experts are neurons of like weights, selectors learn
scores relative to the largest, and representative values are means over all tokens.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from moetool.architectures.dense import is_encoder
from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.results import ConversionResult
from moetool.job.execute import run_stage
from moetool.measure.predictions import HiddenTokens, window_loss
from moetool.moefy.options import MoefyOptions
from moetool.runtime.loading import load_model
from moetool.runtime.modules.led_neurons import LedNeurons
from moetool.runtime.modules.moefied import set_keep
from moetool.stages import stages

KEEP = (0.35, 0.5, 0.75, 0.85)
DEFAULT = "moetool's default"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    DEFAULT: ("g-moefication", {"experts": None}),
    "experts, selectors": ("g-moefication", {}),
    "G-MoEfication": ("g-moefication", {"as_published": True}),
    "MoEfication": ("moefication", {"as_published": True}),
    "random + representative values": ("g-moefication", {"as_published": True, "selector": "random"}),
    "SNIP + representative values": ("g-moefication", {"baseline": "snip"}),
    "oracle": ("g-moefication", {"as_published": True, "selector": "oracle"}),
}


class Judge:
    """Perplexity of models on one text."""

    def __init__(self, model: str, text: str, length: int, windows: int) -> None:
        checkpoint = Checkpoint.open(model)
        self.tokenizer = load_tokenizer(checkpoint.path)
        self.encodes = is_encoder(checkpoint.config)
        self.windows = evaluation_windows(text, self.tokenizer, sequence_length=length, limit=windows)

    def __call__(self, model: Any) -> float:
        if self.encodes:
            losses = window_loss(model, self.windows, HiddenTokens(self.tokenizer, 64))
        else:
            losses = torch.cat([window_loss(model, rows) for rows in self.windows.split(4)])
        return math.exp(losses.mean().item())


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


def as_many(model: Any, keep: float) -> float:
    """The share of the neurons with which a network that computes one projection of all of them multiplies as often as
    one that computes the share `keep` of all matrices."""
    roles = len(next(module for module in model.modules() if isinstance(module, LedNeurons)).names)
    return (keep * roles - 1) / (roles - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "calibration", "test"):
        parser.add_argument(name)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--only", help="One row.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    judge = Judge(options.model, options.test, options.length, options.windows)
    dense = judge(load_model(Checkpoint.open(options.model), torch.float32, "cpu"))
    lines = [
        f"{options.experts} experts per layer, {options.samples} x {options.length} tokens of calibration text, "
        f"{options.windows} windows of {options.length} tokens to test on, {options.seeds} seeds. "
        f"Dense: {dense:.2f}.",
        "",
        "| method | " + " | ".join(f"keep {keep:.0%}" for keep in KEEP) + " | energy kept at 50 % |",
        "|---" * (len(KEEP) + 2) + "|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, (stage, choice) in METHODS.items():
            if options.only not in (None, name):
                continue
            found, computed = ({keep: list[float]() for keep in KEEP} for _ in range(2))
            captured = []
            for seed in range(options.seeds):
                output = Path(directory) / f"{stage}-{seed}-{len(lines)}"
                made = run_stage(
                    stages()[stage],
                    options.model,
                    output,
                    MoefyOptions(
                        keep=0.5,
                        calibration=options.calibration,
                        samples=options.samples,
                        sequence_length=options.length,
                        seed=seed,
                        **{"experts": options.experts, **choice},
                    ),
                )
                assert isinstance(made.details, ConversionResult)
                assert made.details.activations is not None
                share = made.details.activations.captured
                captured.append(math.nan if share is None else share)
                model = load_model(Checkpoint.open(output), torch.float32, "cpu")
                for keep in KEEP:
                    set_keep(model, keep)
                    found[keep].append(judge(model))
                if name == DEFAULT:
                    for keep in KEEP:
                        if (same := as_many(model, keep)) > 0:
                            set_keep(model, same)
                            computed[keep].append(judge(model))
            energy = "" if math.isnan(captured[0]) else f"{statistics.mean(captured):.1%}"
            lines.append(f"| {name} | " + " | ".join(spread(found[keep]) for keep in KEEP) + f" | {energy} |")
            print(lines[-1], flush=True)
            if name == DEFAULT:
                cells = [spread(computed[keep]) if computed[keep] else "" for keep in KEEP]
                lines.append(f"| the same, with as many multiplications | {' | '.join(cells)} | |")
                print(lines[-1], flush=True)
    if options.output is not None:
        options.output.write_text("\n".join([f"# {Path(options.model).name}, moefied", "", *lines, ""]))


if __name__ == "__main__":
    main()
