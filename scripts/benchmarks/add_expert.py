"""An expert that comes and goes: perplexity of a mixed model before, with one more expert, and without one.

    python scripts/benchmarks/add_expert.py --model DENSE --moe MOE --text TEXT --domain DOMAIN \\
        --test TEST --domain-test DOMAIN_TEST

GENERAL is DENSE with FFNs that were trained on TEXT, all else frozen, as FlexOlmo does; OWN is DENSE with FFNs that
were trained on DOMAIN. MIXED is an MoE model of DENSE and GENERAL with routers from texts, MOE one that was upcycled
from DENSE and trained. OWN is added to both; its router row is random or fitted to DOMAIN. Windows of 256 tokens.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import made_by, publish
from transformers import AutoModelForCausalLM

from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.job.execute import run_stage
from moetool.quiet import quiet
from moetool.stages import stages

LENGTH, BATCH, RATE = 256, 8, 1e-3


def trained(source: Path, text: str, output: Path, steps: int) -> Path:
    """The model with FFNs that were trained on a text, in bf16."""
    tokenizer = load_tokenizer(source)
    windows = evaluation_windows(text, tokenizer, sequence_length=LENGTH)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        batch = windows[torch.randint(len(windows), (BATCH,), generator=draw)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with quiet():
        model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    return output


def made(stage: str, source: Path, output: Path, /, **options: Any) -> Path:
    kind = stages()[stage]
    run_stage(kind, source, output, kind.options_type.model_validate(options))
    return output


@torch.no_grad()
def perplexity(path: Path, text: str) -> float:
    """On the first 64 windows."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    windows = evaluation_windows(text, load_tokenizer(path), sequence_length=LENGTH, limit=64)
    losses = [model(input_ids=rows, labels=rows, use_cache=False).loss for rows in windows.split(BATCH)]
    return torch.stack(losses).mean().exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "moe"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("text", "domain", "test", "domain-test"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        general = trained(options.model, options.text, work / "general", options.steps // 2)
        own = trained(options.model, options.domain, work / "own", options.steps)
        texts = {options.model: "bundled:prose", general: options.text}
        sources = [{"model": str(path), "data": text} for path, text in texts.items()]
        size = {"sequence_length": LENGTH, "samples": 32}
        mixed = made(
            "branch-train-mix", options.model, work / "mixed", source=sources, gate_mode="data", rest="input", **size
        )
        found = {"DENSE": options.model, "GENERAL": general, "OWN": own}
        fitted = {"calibration": options.domain, "sequence_length": LENGTH}
        for title, source in (("MIXED", mixed), ("MOE", options.moe)):
            found[title] = source
            for row, more in (("random row", {}), ("row from DOMAIN", fitted)):
                output = work / f"{title}-{row}"
                found[f"{title} and OWN, {row}"] = made("add-expert", source, output, source=str(own), **more)
        found["MIXED and OWN, row from DOMAIN, GENERAL dropped"] = made(
            "drop-experts", found["MIXED and OWN, row from DOMAIN"], work / "left", drop=[1]
        )
        lines = ["| model | perplexity on TEST | on DOMAIN_TEST |", "|---|---|---|"]
        for title, path in found.items():
            on = [perplexity(path, text) for text in (options.test, options.domain_test)]
            lines.append(f"| {title} | {on[0]:.1f} | {on[1]:.1f} |")
    words = "--model DENSE --moe MOE --text TEXT --domain DOMAIN --test TEST --domain-test DOMAIN_TEST"
    publish([made_by(f"python scripts/benchmarks/add_expert.py {words}"), "", *lines], options.output)


if __name__ == "__main__":
    main()
