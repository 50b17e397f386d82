"""Tokens per second of a model whose experts are paged from its files, by the memory that they are given.

    python scripts/benchmarks/offload.py [--work DIR] [--threads 2] [--output FILE.md]

A random Mixtral is written, compressed. Tokens are random, so that routing spreads as far as it can: on a trained
model's own text experts are used again sooner. Settings take turns; each token counts as in the best round. `resident`
is the most that the process had in memory (RSS: its own memory, that of Python and torch, and mapped pages) after any
token. First the system keeps the files in its own cache, as it does while nothing else needs the room; then it is told
to forget them before every token, so that what is asked for again comes from the disk.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import made_by, publish
from runtime import write_models
from transformers import AutoModelForCausalLM

import moetool
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.paging import PagedExperts, resident_bytes

SHARES = (1.0, 0.75, 0.5, 0.25)
DEPTH, HIDDEN, WIDTH, FORM, NEW, ROUNDS = 8, 1024, 3584, "ders 4 bits", 16, 4


class Run:
    """A model, what it had resident at most, and its best speed."""

    def __init__(self, path: Path) -> None:
        with quiet():
            self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.files = [os.open(file, os.O_RDONLY) for file in sorted(path.glob("*.safetensors"))]

    def tokens(self, *, forget: bool) -> tuple[list[float], int]:
        """Seconds of each token, and the most bytes that were resident."""
        ids = torch.randint(8000, (1, 16 + NEW), generator=torch.Generator().manual_seed(0))
        cache = cache_of(self.model(input_ids=ids[:, :16], use_cache=True))
        most, seconds = 0, []
        for position in range(16, 16 + NEW):
            if forget:
                for file in self.files:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            cache = cache_of(self.model(input_ids=ids[:, position : position + 1], **{CACHE: cache}))
            seconds.append(time.perf_counter() - start)
            most = max(most, resident_bytes())
        return seconds, most


def speed(rounds: list[list[float]]) -> float:
    """Tokens per second, each as fast as in the best round: other work slows some."""
    return NEW / sum(map(min, zip(*rounds, strict=True)))


def rows(path: Path) -> list[str]:
    run = Run(path)
    plain = [run.tokens(forget=False) for _ in range(ROUNDS)]
    lines = [f"| all, not paged | {plain[-1][1] / 1e6:.0f} | {speed([own for own, _ in plain]):.1f} | | |"]
    pager: PagedExperts = moetool.page_experts(run.model, 1 << 50)
    run.tokens(forget=False)
    whole, least = sum(pager._sizes.values()), resident_bytes() - pager.held_bytes
    found: dict[tuple[float, bool], list[tuple[list[float], int, float]]] = {}
    for _ in range(ROUNDS):
        for share in SHARES:
            for forget in (False, True):
                pager.memory, pager._others = round(least + share * whole), least
                asked = pager.read_bytes
                seconds, most = run.tokens(forget=forget)
                found.setdefault((share, forget), []).append((seconds, most, (pager.read_bytes - asked) / NEW))
    for share in SHARES:
        kept, forgotten = found[share, False], found[share, True]
        cached, disk = (speed([seconds for seconds, *_ in own]) for own in (kept, forgotten))
        most, read = max(most for _, most, _ in kept), min(read for *_, read in kept)
        lines.append(f"| {share:.0%} | {most / 1e6:.0f} | {cached:.1f} | {disk:.1f} | {read / 1e6:.0f} |")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return [f"Experts take {whole / 1e6:.0f} MB, all weights {size / 1e6:.0f} MB in files.", "", *HEAD, *lines]


HEAD = [
    "| memory for experts | resident, MB | tokens/s, files in the system's cache | from the disk | MB read per token |",
    "|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, help="where the models are written, to be removed: 2.5 GB")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        writing = multiprocessing.get_context("spawn").Process(  # what that leaves in memory is not to count
            target=write_models, args=(Path(work), [FORM], DEPTH, HIDDEN, WIDTH)
        )
        writing.start()
        writing.join()
        publish([made_by(f"python {' '.join(sys.argv)}"), "", *rows(Path(work) / FORM)], options.output)


if __name__ == "__main__":
    main()
