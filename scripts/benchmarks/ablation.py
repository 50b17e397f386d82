"""The D²-MoE paper's ablations (Tables 5 to 9 and 11, Appendix A.7, Figure 4) on one model, at equal bytes.

    python scripts/benchmarks/ablation.py MODEL --calibration TEXT,OTHER --data TEST,OTHER_TEST

Every row compresses MODEL with one option changed, evaluates it on the first --windows windows of the data, and is
compared with the first row of its block. The second text and the second data are used by `texts` alone. Results in
--work are not made again: delete it when the tool, the model or a text has changed.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Kept, excess, made_by

from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.job.execute import run_stage
from moetool.measure.predictions import window_loss
from moetool.runtime.loading import load_model
from moetool.stages import stages

Options = dict[str, Any]
Block = dict[str, Options]  # rows by name: what is changed of PAPER; the first is what the others are compared with

PAPER: Options = {
    "ratio": 0.4, "prune_base": 0.1, "pruning": "semi-dynamic", "allocation": "uniform", "sensitivity": "none"
}  # fmt: skip
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Ablation:
    """One table.

    Attributes:
        title: its headline.
        blocks: rows that are compared with each other.
        data: for each block, the text it is evaluated on.
    """

    title: str
    blocks: Sequence[Block]
    data: Sequence[str]


def ablations(texts: Sequence[str], data: Sequence[str], rank: int) -> dict[str, Ablation]:
    """Every table by name. A new row is a new line here."""

    def ablation(title: str, *blocks: Block) -> Ablation:
        return Ablation(title, blocks, [data[0]] * len(blocks))

    def whole(ratio: float, **change: object) -> Options:
        return {"ratio": ratio, "prune_base": 0.0, "allocation": "water-filling", "sensitivity": "matrix"} | change

    merges = ("fisher", "fisher-frequency", "mean", "frequency", "ties", "regmean")
    bases = ("semi-dynamic", "static", "svd")
    deltas = ("truncation-aware", "activation-aware", "vanilla")
    return {
        "merges": ablation("Table 5: merges", {merge: {"merge": merge} for merge in merges}),
        "compressors": ablation(
            "Table 6: compressors of base and differences",
            # The last row stores what the first does, and skips nothing at run time.
            {f"base: {pruning}": {"prune_base": 0.2, "pruning": pruning} for pruning in bases}
            | {"base: static, half as much": {"prune_base": 0.1, "pruning": "static"}},
            {f"differences: {svd} SVD": {"prune_base": 0.2, "svd": svd} for svd in deltas},
        ),
        "split": ablation(
            "Table 7: how much of the base is pruned",
            {f"base − {tenths}0 %": {"prune_base": tenths / 10} for tenths in range(1, 7)},
        ),
        "samples": ablation(
            "Table 8: calibration windows",
            {f"{samples} windows": {"samples": samples} for samples in (8, 16, 32, 64, 128)},
        ),
        "texts": Ablation(
            "Table 9: calibration text",
            [
                {f"on {Path(held_out).name}: {Path(text).name}": {"calibration": text} for text in texts}
                for held_out in data
            ],
            data,
        ),
        "share": ablation(
            "Table 11: factors that experts share",
            *(
                {f"{ratio:.0%}: {share}": {"ratio": ratio, "share": share} for share in ("none", "v", "u")}
                for ratio in (0.6, 0.75)
            ),
        ),
        "allocation": ablation(
            "Appendix A.7: allocation of ranks, base whole",
            *(
                {
                    f"{ratio:.0%}: {way}": whole(ratio, allocation=way)
                    for way in ("uniform", "adaptive", "water-filling")
                }
                for ratio in (0.2, 0.4, 0.6)
            ),
        ),
        "sensitivity": ablation(
            "Sensitivities (not in the paper), water-filling, base whole",
            *(
                {f"{ratio:.0%}: {kind}": whole(ratio, sensitivity=kind) for kind in ("none", "matrix", "channel")}
                for ratio in (0.2, 0.4, 0.6)
            ),
        ),
        "trim": ablation(
            f"Figure 4: trimmed differences, rank {rank}",
            {f"{trim} of a layer": {"ratio": None, "rank": rank, "trim": trim} for trim in range(8)},
        ),
        "seeds": ablation(
            "Chance: seeds of the calibration windows", {f"seed {seed}": {"seed": seed} for seed in range(4)}
        ),
    }


def standard_error(losses: Sequence[float], others: Sequence[float]) -> float:
    """Of the mean difference of two models' losses on the same windows."""
    differences = [one - other for one, other in zip(losses, others, strict=True)]
    return statistics.stdev(differences) / math.sqrt(len(differences))


def table(ablation: Ablation, measure: Callable[[Options, str], Options], original: Callable[[str], Options]) -> str:
    """Make every row; markdown."""
    lines = [
        f"## {ablation.title}",
        "",
        "| | bytes saved | perplexity | excess loss | relative |",
        "|---|---|---|---|---|",
    ]
    for block, data in zip(ablation.blocks, ablation.data, strict=True):
        before = math.exp(statistics.fmean(original(data)["losses"]))
        reference: tuple[float, list[float]] | None = None
        for name, change in block.items():
            found = measure(PAPER | change, data)
            perplexity = math.exp(statistics.fmean(found["losses"]))
            above = excess(perplexity, before)
            relative = "1"
            if reference is None:
                reference = above, found["losses"]
            else:
                error = standard_error(found["losses"], reference[1]) / reference[0]
                relative = f"{above / reference[0]:.3f} ± {error:.3f}"
            lines.append(f"| {name} | {found['saved']:.3%} | {perplexity:.4f} | {above:.5f} | {relative} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True, metavar="TEXT[,OTHER]")
    parser.add_argument("--data", required=True, metavar="TEST[,OTHER]")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=200, help="how many windows of each data")
    parser.add_argument("--rank", type=int, default=85, help="for trimming")
    parser.add_argument("--only", metavar="NAME[,NAME]", help=", ".join(ablations(["a"], ["b"], 0)))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-ablation")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    texts, data = options.calibration.split(","), options.data.split(",")
    found = ablations(texts, data, options.rank)
    names = options.only.split(",") if options.only else list(found)
    if unknown := set(names) - set(found):
        parser.error(f"--only knows {', '.join(found)}, not {', '.join(sorted(unknown))}")
    kept = Kept(options.work / "losses.jsonl")
    tokenizer = load_tokenizer(options.model)

    def losses(path: str | Path, text: str) -> list[float]:
        import torch

        windows = evaluation_windows(text, tokenizer, sequence_length=options.sequence_length, limit=options.windows)
        model = load_model(Checkpoint.open(path), torch.float32, "cpu")
        batches = windows.split(max(1, BATCH_TOKENS // options.sequence_length))
        return torch.cat([window_loss(model, batch) for batch in batches]).tolist()

    def key(**more: object) -> str:
        return json.dumps([options.model, options.sequence_length, options.windows, more], sort_keys=True)

    def original(text: str) -> Options:
        return kept.get(key(data=text), lambda: {"losses": losses(options.model, text)})

    def measure(change: Options, text: str) -> Options:
        asked = {
            "calibration": texts[0], "mix": 0, "samples": options.samples,
            "sequence_length": options.sequence_length, **change,
        }  # fmt: skip
        stage, target = stages()["d2moe"], options.work / "model"

        def make() -> Options:
            made = run_stage(stage, options.model, target, stage.options_type(**asked), overwrite=True)
            assert made.sizes is not None
            return {"saved": made.sizes.achieved_ratio, "losses": losses(target, text)}

        return kept.get(key(data=text, options=asked), make)

    tables = "\n\n".join(table(found[name], measure, original) for name in names)
    evaluated = [text for name in names for text in found[name].data]
    head = " ".join(
        f"Original: perplexity {math.exp(statistics.fmean(original(text)['losses'])):.4f} on the first "
        f"{len(original(text)['losses'])} windows of {options.sequence_length} tokens of {Path(text).name}."
        for text in dict.fromkeys(evaluated)
    )
    print(f"{head}\n\n{tables}")
    if options.output:
        command = (
            f"python scripts/benchmarks/ablation.py MODEL --calibration {','.join(Path(text).name for text in texts)} "
            f"--data {','.join(Path(text).name for text in data)} --samples {options.samples} "
            f"--sequence-length {options.sequence_length} --windows {options.windows} --rank {options.rank}"
            + (f" --only {options.only}" if options.only else "")
        )
        options.output.write_text(f"{made_by(command)}\n\n{head}\n\n{tables}\n")


if __name__ == "__main__":
    main()
