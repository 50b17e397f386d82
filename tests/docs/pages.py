"""The pages of the documentation: their blocks, and what is put in the place of what a test cannot have."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

# What a page calls a model or a text, and the fixture that stands for it.
MODELS = {
    "mistralai/Mixtral-8x7B-v0.1": "documented_moe",
    "mistralai/Mistral-7B-v0.1": "documented_dense",
    "meta-llama/Llama-3.1-8B": "documented_dense",
    "meta-llama/Llama-3.2-3B": "documented_dense",
    "demo/dense": "documented_dense",
    "MODEL": "documented_moe",
    "DENSE": "documented_dense",
    "THE_DENSE_MODEL": "documented_dense",
    "law-model": "documented_dense",
    "deeper": "documented_deeper",
}
# Files that a page takes for granted, by the fixture whose content they have.
FILES = {
    "my-text.txt": "documented_text",
    "held-out.txt": "held_out_text",
    "TEXT.txt": "documented_text",
    "demo/train.txt": "documented_text",
    "demo/held-out.txt": "held_out_text",
    "my-text.jsonl": "instructions",
    "instructions.jsonl": "instructions",
    "held-out.jsonl": "instructions",
    "THEIRS.gguf": "quantized_file",
    "run.json": "recorded_run",
    "eval.json": "recorded_evaluation",
}
# What a page takes from another: what is made first, in the words of the page that makes it.
EARLIER = {
    "docs/bench.md": ["docs/compress.md"],
    "docs/evaluate.md": ["docs/compress.md"],
    "docs/export.md": ["docs/compress.md", "docs/upcycle.md"],
    "docs/jobs.md": ["docs/upcycle.md"],
    "docs/report.md": ["docs/compress.md"],
    "docs/tune.md": ["docs/upcycle.md"],
}
# Commands that no test runs, and why.
NOT_RUN = {
    "make": "sets up an environment, with a network",
    "source": "activates that environment",
    "pip": "installs, with a network",
    ".venv/bin/python": "runs other tests",
    "python": "a benchmark: hours on a model of one's own; its options are checked by test_scripts_exist",
    "sbatch": "needs Slurm",
    "llama-quantize": "llama.cpp's; test_cli_gguf_quantize.py calls what it calls",
    "mlx_lm.chat": "mlx-lm's; test_cli_mlx.py loads what it loads",
    "torchrun": "starts processes; test_cli_ranks.py and test_cli_tune.py of tests/integration do",
    "accelerate": "needs a card for every process",
}
SHELL = ("console", "bash")
# Options after the shown ones, by what a command is: fewer and shorter windows, fewer steps, groups that divide a tiny
# matrix, and bits that its short rows can have.
SMALLER = {
    "calibration": "--samples 4 --sequence-length 32",
    "moefy": "--samples 16 --sequence-length 64 --experts 4",
    "tune": "--sequence-length 32 --steps 2",
    "repair": "--samples 4 --sequence-length 32 --steps 2 --held-out 2",
    "compare": "--sequence-length 32 --windows 4 --samples 4",
    "evaluation": "--sequence-length 32 --windows 4",
    "bench": "--lengths 16 --new-tokens 2 --rounds 1",
    "groups": "--group-size 32",
    "refine": "--refine 2",
    "types": "--target-bpw 12",
    "packing": "--group-size 64",
}

TEXT = ("--calibration", "TEXT.txt")
# What no page shows, for fields that nothing else prints.
RUN_FOR_JSON = [
    ["compress", "MODEL", "found", "--method", "auto", "--max-increase", "300%", "--held-out", "4", *TEXT],
    ["compress", "MODEL", "x", "--method", "hybrid", "--ratio", "0.5", *TEXT, "--dry-run"],
    ["compress", "MODEL", "x", "--method", "hybrid", "--ratio", "0.5", "--calibration", "self", "--dry-run"],
    [
        "compare",
        "MODEL",
        "--models",
        "MODEL",
        "--methods",
        "d2moe",
        "--ratios",
        "0.99",
        "--data",
        "TEXT.txt,held-out.txt",
    ],
    ["upcycle", "demo/dense", "x", "--method", "simoe", "--dry-run"],
    ["upcycle", "specialists", "x", "--method", "add-expert", "--source", "law-model", "--dry-run"],
    ["compress", "more-specialists", "x", "--method", "drop-experts", "--drop", "0", "--dry-run"],
    ["prune-base", "SPLIT", "x", "--ratio", "0.2", "--dry-run"],
    ["export", "MODEL", "x", "--format", "compressed-tensors", "--group-size", "16", "--bits", "3", "--dry-run"],
    ["verify", "mixtral-all", "--against", "MODEL"],
    [
        "verify",
        "mixtral-all",
        "--against",
        "MODEL",
        *("--text", "TEXT.txt,held-out.txt", "--windows", "4", "--sequence-length", "32"),
    ],
    ["eval", "deeper", "--data", "held-out.txt", "--against", "MODEL"],
    ["inspect", "config-alone"],
    ["inspect", "demo/dense"],
    ["inspect", "THEIRS.gguf"],
    ["recommend", "THEIRS.gguf"],
    ["compare", "THEIRS.gguf", "--models", "THEIRS.gguf", "--data", "held-out.txt"],
    ["report", "THEIRS.gguf", "theirs.html", "--against", "THEIRS.gguf"],
    ["compress", "THEIRS.gguf", "x", "--method", "quantize", "--bits", "4", "--dry-run"],
    ["compress", "THEIRS.gguf", "from-gguf", "--method", "quantize", "--bits", "4"],
    ["recommend", "MODEL", "--memory", "64GB"],
    ["recommend", "MODEL", "--memory", "1000300kB"],
    ["compress", "MODEL", "low-rank", "--method", "d2moe", "--ratio", "0.4", *TEXT],
    ["inspect", "low-rank"],
    ["report", "low-rank", "low-rank.html"],
    ["inspect", "OUT_2"],
    ["report", "mixtral-few"],
    ["report", "skipping", "--analysis"],
    [
        "compress",
        "MODEL",
        "refined",
        "--method",
        "hybrid",
        "--refine",
        "2",
        "--ratio",
        "0.75",
        "--calibration",
        "TEXT.txt",
    ],
    ["compress", "config-alone", "x", "--ratio", "0.4", "--calibration", "TEXT.txt", "--dry-run"],
    ["compress", "config-in-fp8", "x", "--ratio", "0.1", "--calibration", "TEXT.txt", "--dry-run"],
    [
        "compress",
        "config-alone",
        "x",
        "--ratio",
        "0.01",
        "--method",
        "d2moe",
        "--trim",
        "2",
        "--calibration",
        "TEXT.txt",
        "--dry-run",
    ],
]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, the number of the first in its page, and the file of the package that it
    is, if it is one."""

    language: str
    lines: tuple[str, ...]
    line: int
    file: str = ""


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page, in order, and the last cells of a table whose last column is `type this`."""
    found, language, kept, first, is_typed = [], None, [], 0, False
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
        if language is None and line.startswith("|"):
            is_typed = line.endswith("| type this |") or (is_typed and line.endswith("|"))
            if is_typed and (typed := re.search(r"`(moetool [^`]+)` \|$", line)):
                found.append(Block("bash", (typed[1],), number))
        elif not line.startswith("```"):
            is_typed = False
            kept.append(line)
        elif language is None:
            language, kept, first = line.removeprefix("```"), [], number + 1
        else:
            name, _, file = language.partition(" ")
            found.append(Block(name, tuple(kept), first, file))
            language = None
    assert language is None, f"{page}: a block that begins before line {first} does not end"
    return found


def shell_words(page: str) -> list[list[str]]:
    """The words of every command that a page shows."""
    return [words for block in blocks(page) if block.language in SHELL for words in commands(block)]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every command: lines after `$` of a console block, all lines of a shell block."""
    for line in block.lines:
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        if words := shlex.split(line, comments=True):
            yield words


def smaller(arguments: list[str]) -> list[str]:
    """The same command in the small."""
    name, more = arguments[0], []
    presets = "--preset" in arguments
    if name == "moefy":
        more.append(SMALLER["moefy"])
    elif name == "tune":
        more.append(SMALLER["tune"])
    elif name == "repair":
        more.append(SMALLER["repair"])
    elif name == "compare":
        more.append(SMALLER["compare"])
        if "--ratios" in arguments:  # the first of them
            more.append(f"--ratios {arguments[arguments.index('--ratios') + 1].split(',')[0]}")
    elif name in ("eval", "routing") or (name == "report" and "--data" in arguments):
        more.append(SMALLER["evaluation"])
    elif name == "bench":
        more.append(SMALLER["bench"])
    elif "drop-experts" in arguments:
        pass  # it reads no text
    elif "--calibration" in arguments or name in ("compress", "upcycle"):
        more.append(SMALLER["calibration"])
    if "--repair" in arguments:
        more.append("--repair 2")
    if presets and name in ("compress", "upcycle") and "--calibration" not in arguments:
        more.append("--calibration TEXT.txt")
    if "hybrid" in arguments or name == "quantize-delta":
        more.append(SMALLER["groups"])
    if "--refine" in arguments or "best" in arguments:
        more.append(SMALLER["refine"])
    if "--target-bpw" in arguments:
        more.append(SMALLER["types"])
    if "mlx" in arguments and "--group-size" not in arguments:
        more.append(SMALLER["groups"])
    if "compressed-tensors" in arguments and "--group-size" not in arguments:
        more.append(SMALLER["packing"])
    if name == "decompose" and "--base-bits" in arguments:
        more.append(SMALLER["groups"])
    return [*arguments, *" ".join(more).split()]


def sections(page: str) -> dict[str, list[list[str]]]:
    """The rows of the table under every heading of a page, by heading, without backquotes."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").replace("`", "")
            found[heading] = []
        elif heading and line.startswith("| `"):
            found[heading].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


# Their commands need their files: test_adding.py runs both.
ADDING = ("docs/adding.md", "docs/adding-kernels.md", "docs/adding-kinds.md", "docs/adding-stages.md")
RUNNING = [
    page for page in PAGES if page not in ADDING and any(block.language in (*SHELL, "python") for block in blocks(page))
]
