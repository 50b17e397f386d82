"""A model through every door, at about 2, 3 and 4 bits: its size, what it loses, and how fast it runs.

    python scripts/benchmarks/doors.py MODEL --calibration VALID.txt --tests home=TEST.txt perldoc=PERL.txt --work DIR

Doors are moetool's own format in transformers, compressed-tensors in transformers, and GGUF in llama.cpp: there,
files of `export --format gguf --size`, and as a peer those of llama.cpp's quantizer with moetool's importance matrix;
with `--repair STEPS` both once more after `moetool repair`. A dense model goes into GGUF alone.
GGUF files and moetool's own format have as many bytes as the quantizer's. Divergence is from an F16 file in llama.cpp.
Wants what gguf_codes.py wants, and compressed-tensors. A run that was stopped goes on where it was.
"""

import argparse
import math
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Kept, made_by, publish
from export_gguf import Llama, transformers_logits
from gguf_codes import Doors, parser_of, test_windows
from other_text import Run, compressed
from transformers import AutoModelForCausalLM

from moetool.checkpoint.reader import Checkpoint
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.words import MODEL
from moetool.job.execute import run_stage
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.stages import stages

MIXTURES = ("Q2_K", "Q3_K_M", "Q4_K_M")  # of llama.cpp, which say how many bits most experts get
GROUP = 64  # of compressed-tensors
PROMPT, NEW = 256, 48


def in_llama_cpp(file: Path, ids: list[int]) -> dict[str, float]:
    """Tokens per second there, with one thread: of a prompt, and of what follows it."""
    model = Llama(str(file), n_ctx=PROMPT + NEW, n_batch=PROMPT, n_ubatch=PROMPT, verbose=False, n_threads=1,
                  n_threads_batch=1)  # fmt: skip

    def run(tokens: list[int]) -> float:
        start = time.perf_counter()
        model.eval(tokens)
        return time.perf_counter() - start

    prompts, steps = [], []
    for _ in range(3):
        model.reset()
        prompts.append(run(ids[:PROMPT]))
        steps.append(sum(run([token]) for token in ids[PROMPT : PROMPT + NEW]))
    model.close()
    return {"prefill": PROMPT / min(prompts), "decode": NEW / min(steps)}


def in_transformers(path: Path, ids: list[int]) -> dict[str, float]:
    """Tokens per second in transformers, in the checkpoint's dtype."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    tokens = torch.tensor([ids])
    prompts, steps = [], []
    with torch.inference_mode():
        for _ in range(3):
            start = time.perf_counter()
            cache = cache_of(model(tokens[:, :PROMPT], use_cache=True))
            prompts.append(time.perf_counter() - start)
            start = time.perf_counter()
            for place in range(PROMPT, PROMPT + NEW):
                model(tokens[:, place : place + 1], **{CACHE: cache}, use_cache=True)
            steps.append(time.perf_counter() - start)
    return {"prefill": PROMPT / min(prompts), "decode": NEW / min(steps)}


class Timed(Doors):
    """Doors whose results tell, too, how fast they run.

    Args:
        ids: tokens of a text.
    """

    def __init__(
        self, model: Path, windows: Mapping[str, torch.Tensor], options: argparse.Namespace, ids: list[int]
    ) -> None:
        self.ids = ids
        super().__init__(model, windows, options)

    def measured(self, file: Path, began: float) -> dict[str, Any]:
        return super().measured(file, began) | in_llama_cpp(file, self.ids)

    def whole(self) -> dict[str, Any]:
        """The F16 file."""
        return self.measured(self._plain, time.monotonic())

    def checkpoint(self, path: Path, beside: int, began: float) -> dict[str, Any]:
        """A checkpoint in transformers, run in fp32 for what it loses; `beside` are bytes that a GGUF file has more."""
        size = Checkpoint.open(path).weight_bytes + beside
        return self._measured(size, began, partial(transformers_logits, path)) | in_transformers(path, self.ids)

    def own(self, size: int) -> dict[str, Any]:
        began, options, target = time.monotonic(), self.options, self.options.work / "own"
        beside = self._plain.stat().st_size - Checkpoint.open(self.model).weight_bytes  # tokenizer and header
        text = f"--calibration {options.calibration} --samples {options.samples} --sequence-length {options.length}"
        compressed(str(self.model), target, Run("", f"{options.own} --size {size - beside} {text}", "", None, "", 0))
        return self._left(target, beside, began)

    def packed(self, bits: int) -> dict[str, Any]:
        """The model in compressed-tensors, codes chosen on the text."""
        began, options, target = time.monotonic(), self.options, self.options.work / "packed"
        kind = stages()["compressed-tensors"]
        text = {"calibration": options.calibration, "samples": options.samples, "sequence_length": options.length}
        run_stage(kind, self.model, target, kind.options_type(bits=bits, group_size=GROUP, **text), overwrite=True)
        return self._left(target, self._plain.stat().st_size - Checkpoint.open(self.model).weight_bytes, began)

    def repaired(self, file: Path) -> dict[str, Any]:
        """A GGUF file after `moetool repair` towards the model."""
        began, options, target = time.monotonic(), self.options, self.options.work / "repaired"
        kind = stages()["repair"]
        text = {"calibration": options.calibration, "sequence_length": options.length}
        given = {"to": str(self.model), "steps": options.repair, "samples": options.repair_samples}
        run_stage(kind, file, target, kind.options_type(**given, **text), overwrite=True)
        found = self.measured(target / MODEL, began)
        shutil.rmtree(target)
        return found

    def _left(self, target: Path, beside: int, began: float) -> dict[str, Any]:
        found = self.checkpoint(target, beside, began)
        shutil.rmtree(target)
        return found


def main() -> None:
    parser = parser_of(__doc__, windows=24)
    parser.add_argument("--name", help="of the model, in the table")
    parser.add_argument("--mixtures", nargs="+", default=MIXTURES, help="of llama.cpp, whose bytes all others get")
    parser.add_argument("--repair", type=int, metavar="STEPS", help="repair GGUF files, too")
    parser.add_argument("--repair-samples", type=int, default=240, help="windows that a repair trains on")
    parser.add_argument("--no-packed", action="store_true", help="without compressed-tensors, as some families are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    windows, kept = test_windows(options), Kept(options.work / "every-door.jsonl")
    first = next(iter(windows))
    doors = Timed(options.model, windows, options, windows[first].flatten().tolist())
    columns = ["", "MB", f"perplexity, {first}", *(f"KL, {name}" for name in windows), "prefill", "decode"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]

    def row(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = kept.get(name, make)
        losses = [f"{1000 * loss:.2f}" for loss in found["kl"].values()]
        cells = [name, f"{found['bytes'] / 1e6:.2f}", f"{math.exp(found['nll'][first]):.2f}", *losses]
        cells += [f"{found['prefill']:.0f}", f"{found['decode']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        return found

    is_dense = GgufSource.of(Checkpoint.open(options.model)).experts is None
    row("original, transformers", lambda: doors.checkpoint(options.model, 0, time.monotonic()))
    row("F16, llama.cpp", doors.whole)
    for mixture in options.mixtures:
        theirs = row(f"{mixture} by llama.cpp, importance", partial(doors.theirs, mixture, told=True))
        size = theirs["bytes"]
        row(f"`export --format gguf --size`, as many bytes as {mixture}", partial(doors.sized, size))
        if options.repair:
            row(f"{mixture} by llama.cpp, repaired", partial(doors.repaired, options.work / f"llama-{mixture}.gguf"))
            ours = options.work / f"size-{size}" / MODEL
            row(f"`--size`, as many bytes as {mixture}, repaired", partial(doors.repaired, ours))
        if not is_dense:
            row(f"own format, as many bytes as {mixture}", partial(doors.own, size))
        if not is_dense and not options.no_packed:
            bits = int(next(filter(str.isdigit, mixture)))
            row(f"compressed-tensors, {bits} bits", partial(doors.packed, bits))
    command = "python scripts/benchmarks/doors.py MODEL --calibration VALID --tests home=TEST perldoc=PERL --work DIR"
    publish([made_by(command), "", f"## {options.name or options.model.name}", "", *lines], options.output)


if __name__ == "__main__":
    main()
