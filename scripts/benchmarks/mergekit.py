"""Upcycling a dense llama to eight experts: mergekit-moe and moetool side by side.

    OMP_NUM_THREADS=1 python scripts/benchmarks/mergekit.py --mergekit ENV/bin/mergekit-moe \\
        --model DENSE --data TEST.txt --calibration VALID.txt

ENV is an environment with `pip install mergekit`. Both tools run through their command lines, in turns, and what they
write is measured alike: loaded by transformers and run in fp32 on the first windows of --data, beside DENSE. Every
number is the median of --runs runs with seeds 0, 1, 2, … A small model's seconds and memory are mostly those of
importing libraries, so both tools then upcycle a larger random llama, of which only seconds and memory are measured.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import made_by
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from moetool.calibration.windows import evaluation_windows

EXPERTS, TOP_K = 8, 2
WINDOWS, LENGTH = 4, 256
# mergekit's `hidden` takes the state of a prompt's last token. With these it finds nothing to warn of …
TOPICS = (
    "goals , match , season , league",
    "album , song , single , chart",
    "battle , army , regiment , general",
    "def main ( self ) : return 0",
    "species , genus , habitat , males",
    '" I do not know , " said Mr. Holmes .',
    "storm , wind , rain , km / h",
    "king , duke , bishop , church",
)
# … and with these, most of which end with a full stop, it does.
SENTENCES = (
    "The river flows through the old town.",
    "The team won the final match of the season.",
    "The album was released in the summer.",
    "The battle began at dawn near the border.",
    "def main(): return the sum of the list",
    "The species is found in tropical forests.",
    "The king was crowned in the cathedral.",
    "The storm moved slowly across the ocean.",
)
# In a process of its own, because a child's peak starts at that of its parent, which here holds models. Linux has KiB.
PROBE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
finished = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"code": finished.returncode, "log": finished.stderr, "seconds": seconds, "memory": peak}))
"""

Way = Callable[[Path, Path, int], list[object]]  # a command from source, target and seed
Scores = dict[str, float]


class FailedError(Exception):
    """A tool did not make a model."""


def mergekit(executable: str, mode: str, *flags: str, prompts: Sequence[str] = TOPICS) -> Way:
    """Upcycling by mergekit-moe, which wants the long flag for equal experts in all modes but `random`."""

    def command(source: Path, target: Path, seed: int) -> list[object]:
        experts = [{"source_model": str(source), "positive_prompts": [prompt]} for prompt in prompts]
        config = target.with_suffix(".yml")
        entries = {"base_model": str(source), "gate_mode": mode, "experts_per_token": TOP_K, "experts": experts}
        config.write_text(json.dumps(entries))  # JSON is YAML
        agreed = "--i-understand-this-is-not-useful-without-training"
        return [executable, config, target, "--random-seed", seed, agreed, *flags]

    return command


def moetool(*flags: str) -> Way:
    """Upcycling by moetool."""

    def command(source: Path, target: Path, seed: int) -> list[object]:
        shape = ["--method", "vanilla", "--experts", EXPERTS, "--top-k", TOP_K]
        return [sys.executable, "-m", "moetool", "upcycle", source, target, *shape, "--seed", seed, *flags]

    return command


def run(command: list[object]) -> Scores:
    """Wall time and peak resident memory, mapped files included. Raises `FailedError`."""
    probe = [sys.executable, "-c", PROBE, *map(str, command)]
    found = json.loads(subprocess.run(probe, stdout=subprocess.PIPE, text=True, check=True).stdout)
    lines = found.pop("log").strip().splitlines()
    if found.pop("code"):
        raise FailedError(lines[-1] if lines else "no message")
    for line in lines:
        if line.startswith("WARNING"):
            print(line, file=sys.stderr)
    return found


class Judge:
    """Measures MoE models beside the dense model that they came from."""

    def __init__(self, dense: Path, data: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(dense)
        self._windows = evaluation_windows(data, tokenizer, sequence_length=LENGTH, limit=WINDOWS)
        self._dense, _ = self._answer(dense)

    @torch.inference_mode()
    def _answer(self, path: Path) -> tuple[Tensor, list[Tensor]]:
        """Logits `[windows, length, vocabulary]`, and of each router its logits `[tokens, experts]`, all fp32."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        routed: list[Tensor] = []

        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            routed.append(output[0])

        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(keep)
        return model(input_ids=self._windows, use_cache=False).logits, routed

    def scores(self, path: Path) -> Scores:
        """Relative logit error, mean entropies in nats, and the extremes over experts and layers of the assignments."""
        logits, routed = self._answer(path)
        probabilities = torch.stack(routed).double().softmax(-1)  # [layers, tokens, experts]
        top = probabilities.topk(TOP_K, dim=-1)
        weights = top.values / top.values.sum(-1, keepdim=True)
        shares = torch.stack([torch.bincount(layer.flatten(), minlength=EXPERTS) for layer in top.indices])
        shares = shares / shares.sum(-1, keepdim=True)
        return {
            "error": ((logits - self._dense).double().norm() / self._dense.double().norm()).item(),
            "entropy": torch.special.entr(probabilities).sum(-1).mean().item(),
            "top": torch.special.entr(weights).sum(-1).mean().item(),
            "least": shares.min().item(),
            "most": shares.max().item(),
        }


def measured(ways: dict[str, Way], source: Path, work: Path, runs: int, judge: Judge | None) -> dict[str, Any]:
    """Medians by row, or what went wrong."""
    found: dict[str, list[Scores]] = {}
    failed: dict[str, str] = {}
    target = work / "out"
    for seed in range(runs):
        for name, way in ways.items():
            shutil.rmtree(target, ignore_errors=True)
            try:
                scores = run(way(source, target, seed))
            except FailedError as error:
                failed[name] = str(error)
                continue
            scores |= judge.scores(target) if judge else {}
            found.setdefault(name, []).append(scores)
            print(name, scores, file=sys.stderr, flush=True)
    shutil.rmtree(target, ignore_errors=True)
    medians = {
        name: {key: median(scores[key] for scores in all_of) for key in all_of[0]} for name, all_of in found.items()
    }
    return {name: failed.get(name) or medians[name] for name in ways}


def row(name: str, scores: Scores | str, columns: int) -> str:
    if isinstance(scores, str):
        return f"| {name} | {scores} |" + " |" * (columns - 1)
    cells = [f"{scores['seconds']:.1f}", f"{scores['memory'] / 1e6:,.0f} MB"]
    if "error" in scores:
        cells += [f"{scores['error']:.1e}", f"{scores['entropy']:.3f}", f"{scores['top']:.3f}"]
        cells += [f"{scores['least']:.1%} / {scores['most']:.1%}"]
    return f"| {name} | {' | '.join(cells)} |"


def write_llama(directory: Path, tokenizer: Path, hidden: int, intermediate: int, layers: int) -> None:
    """A random llama in bf16 with the tokenizer of another model."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    words.save_pretrained(directory)


def tables(options: argparse.Namespace, work: Path) -> list[str]:
    """Lines of markdown: all measures on the model that is given, costs on a large one."""
    tool = options.mergekit
    ways = {
        "mergekit `random`": mergekit(tool, "random"),
        "mergekit `uniform_random`": mergekit(tool, "uniform_random"),
        "mergekit `cheap_embed`": mergekit(tool, "cheap_embed"),
        "mergekit `hidden`": mergekit(tool, "hidden"),
        "mergekit `hidden`, prompts are sentences": mergekit(tool, "hidden", prompts=SENTENCES),
        "moetool": moetool(),
        "moetool `--no-proof`": moetool("--no-proof"),
        "moetool `--center-router`": moetool("--center-router", "--calibration", options.calibration, "--mix", "0"),
    }
    judge = Judge(options.model, options.data)
    lines = [
        "| tool and gate mode | seconds | peak memory | relative logit error | router entropy | of the top 2 "
        "| least / most expert share |",
        "|---|---|---|---|---|---|---|",
    ]
    measures = measured(ways, options.model, work, options.runs, judge)
    lines += [row(name, scores, 6) for name, scores in measures.items()]
    small_shards = {"mergekit `random`, 0.4 GB per file": mergekit(tool, "random", "--out-shard-size", "200M")}
    large = work / "llama"
    write_llama(large, options.model, options.hidden, options.intermediate, options.layers)
    size = (large / "model.safetensors").stat().st_size
    lines += [
        "",
        f"A random llama of {size / 1e9:.2f} GB (hidden {options.hidden}, FFN {options.intermediate}, {options.layers} "
        "layers):",
        "",
        "| tool and gate mode | seconds | peak memory |",
        "|---|---|---|",
    ]
    costs = measured(small_shards | ways, large, work, options.large_runs, None)
    lines += [row(name, scores, 2) for name, scores in costs.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", required=True, help="the executable mergekit-moe")
    parser.add_argument("--model", type=Path, required=True, help="a dense llama")
    parser.add_argument("--data", required=True, help="text to measure on")
    parser.add_argument("--calibration", required=True, help="text for --center-router")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--large-runs", type=int, default=3, help="on the random llama")
    parser.add_argument("--hidden", type=int, default=1024, help="of the random llama, as what follows")
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where models may lie meanwhile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        table = "\n".join(tables(options, Path(work)))
    print(table)
    if options.output:
        code = "import importlib.metadata as m; print(m.version('mergekit'), 'with torch', m.version('torch'))"
        python = Path(options.mergekit).parent / "python"
        version = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        command = (
            "OMP_NUM_THREADS=1 python scripts/benchmarks/mergekit.py --mergekit ENV/bin/mergekit-moe --model DENSE "
            "--data TEST --calibration VALID"
        )
        options.output.write_text(f"{made_by(command)} The peer is mergekit {version}.\n\n{table}\n")


if __name__ == "__main__":
    main()
