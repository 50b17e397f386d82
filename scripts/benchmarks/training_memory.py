"""Peak memory of training an MoE model whose experts are deltas to one FFN, against the dense model (DeRS, Table 6).

    python scripts/benchmarks/training_memory.py

A random Llama is fine-tuned as it is, as 8 copies of its FFN (`upcycle --method vanilla`), and as 8 differences to it
(`ders-sparse`, `ders-lowrank`), top-2, in fp32 with AdamW, every subject in a process of its own. The peak is the
largest resident set of the process (VmHWM) less what it was after the imports: loading with the pages of mapped
files, weights, gradients, optimizer and activations. Of it, the state is computed: 4 bytes per parameter, 12 more per
trained one. glibc gives freed blocks of 64 kB and more back at once, so that it is memory in use that is compared; the
last table shows what comes on top where it keeps blocks of up to 4 MB, as in `moetool tune`, or what it likes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # before anything is measured
import transformers.models.mixtral.modeling_mixtral  # noqa: F401
from _common import made_by, publish
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import moetool  # noqa: F401  (lets transformers load differences)
from moetool.job.execute import run_stage
from moetool.quiet import quiet
from moetool.stages import stages

METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "ders-sparse": {"drop": 0.9999},
    "ders-lowrank": {"rank": 1},
}
SUBJECTS = {
    "dense fine-tuning": ("dense", "all"),
    "vanilla, 8 experts": ("vanilla", "all"),
    "DeRS-SM": ("ders-sparse", "all"),
    "DeRS-LM": ("ders-lowrank", "all"),
    "DeRS-SM, experts and routers": ("ders-sparse", "experts"),
    "DeRS-LM, experts and routers": ("ders-lowrank", "experts"),
    "DeRS-SM, shared FFN frozen": ("ders-sparse", "differences"),
    "DeRS-LM, shared FFN frozen": ("ders-lowrank", "differences"),
}
GOAL = 1.3


def peak_bytes() -> int:
    """Largest resident set so far. Not ru_maxrss, which a process takes over from the one that started it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def is_trained(name: str, train: str) -> bool:
    """As `moetool tune` chooses: everything, experts and routers (its default), or these with `--freeze-shared`."""
    is_base = name.endswith(("gate_up_proj", "down_proj"))
    return (
        train == "all"
        or name.endswith("mlp.gate.weight")
        or (".experts." in name and not (is_base and train != "experts"))
    )


def measure(model_path: Path, train: str, rows: int, length: int, steps: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    before = peak_bytes()
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, train))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(steps):
        ids = torch.randint(model.config.vocab_size, (rows, length), generator=tokens)
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in trained)
    return {
        "parameters": parameters,
        "trained": count,
        "state": 4 * parameters + 12 * count,
        "peak": peak_bytes() - before,
        "speed": rows * length / statistics.median(seconds[1:] or seconds),
    }


def prepare(work: Path, options: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.intermediate,
        num_hidden_layers=options.layers, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet():
        LlamaForCausalLM(config).save_pretrained(work / "dense")
    for method, own in METHODS.items():
        chosen = stages()[method].options_type.model_validate({"experts": 8, "top_k": 2, "proof": False, **own})
        run_stage(stages()[method], work / "dense", work / method, chosen)


def run(options: argparse.Namespace, subject: str, rows: int, kept: int | None) -> dict[str, Any]:
    """Measure in a new process, whose glibc keeps freed blocks below `kept` bytes."""
    model, train = SUBJECTS[subject]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    if kept:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(kept)
    finished = subprocess.run(
        [sys.executable, __file__, "--child", str(options.work / model), "--train", train, "--rows", str(rows),
         "--length", str(options.length), "--steps", str(options.steps), "--threads", str(options.threads)],
        stdout=subprocess.PIPE, text=True, check=True, env=environment,
    )  # fmt: skip
    return json.loads(finished.stdout.splitlines()[-1])


def table(options: argparse.Namespace, rows: int) -> tuple[list[str], float]:
    """Every subject, and the largest share of the dense model's peak that differences take."""
    lines = [
        f"{rows} x {options.length} tokens per step:",
        "",
        "| subject | parameters | trained | state | everything else | peak | of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    dense, worst = 0, 0.0
    for subject in SUBJECTS:
        found = run(options, subject, rows, 1 << 16)
        dense = dense or found["peak"]
        ratio = found["peak"] / dense
        if subject.startswith("DeRS"):
            worst = max(worst, ratio)
        lines.append(
            f"| {subject} | {found['parameters'] / 1e6:.1f} M | {found['trained'] / 1e6:.2f} M "
            f"| {found['state'] / 1e6:.0f} MB | {(found['peak'] - found['state']) / 1e6:.0f} MB "
            f"| {found['peak'] / 1e6:.0f} MB | {ratio:.2f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines, worst


def allocators(options: argparse.Namespace, rows: int) -> list[str]:
    lines = [
        f"Where glibc keeps what was freed ({rows} x {options.length} tokens per step):",
        "",
        "| subject | blocks up to 4 MB | of dense | tokens/s | as it likes | of dense | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    dense: list[dict[str, Any]] = []
    for subject in list(SUBJECTS)[:6]:
        found = [run(options, subject, rows, kept) for kept in (4 << 20, None)]
        dense = dense or found
        cells = " | ".join(
            f"{one['peak'] / 1e6:.0f} MB | {one['peak'] / own['peak']:.2f} | {one['speed']:.0f}"
            for one, own in zip(found, dense, strict=True)
        )
        lines.append(f"| {subject} | {cells} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[2], help="Sequences per step, one table for each.")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-training-memory")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child = options.child, options.train, options.rows[0], options.length, options.steps, options.threads
        print(json.dumps(measure(*child)))
        return
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    prepare(options.work, options)
    parts = [
        made_by("python scripts/benchmarks/training_memory.py"),
        f"Hidden {options.hidden}, FFN {options.intermediate}, {options.layers} layers, {options.threads} threads; "
        "drop rate 0.9999, rank 1.",
    ]
    worst = 0.0
    for rows in options.rows:
        lines, ratio = table(options, rows)
        parts += ["", *lines]
        worst = max(worst, ratio)
    verdict = "PASS" if worst <= GOAL else "missed"
    parts += [
        "",
        f"{verdict}: of memory in use, differences take at most {worst:.2f} of the dense model's peak; goal {GOAL}.",
    ]
    parts += ["", *allocators(options, options.rows[0])]
    shutil.rmtree(options.work, ignore_errors=True)
    publish(parts, options.output)


if __name__ == "__main__":
    main()
