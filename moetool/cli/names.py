"""Names of the commands, where each is defined, and its line of `moetool --help`."""

import ast
import importlib.util
import pkgutil
from pathlib import Path

from moetool.compress import stages

# Name → (module with a function `build(name, arguments)`, one line for --help).
COMMANDS: dict[str, tuple[str, str]] = {
    "upcycle": ("stage", "Turn a dense model into an MoE model (--method drop …); add an expert to one (add-expert)."),
    "moefy": ("stage", "Split a dense model's FFNs into experts and skip most of them, without training."),
    "tune": ("stage", "Fine-tune on instructions or text, with a load-balancing loss for MoE models."),
    "compress": (
        "stage",
        "Make an MoE model smaller in one streamed pass, by whatever loses least (or --method d2moe …).",
    ),
    "repair": ("stage", "Train what costs no byte of a compressed model or a GGUF file towards its original."),
    "fisher-merge": ("stage", "Stage 1: merge each layer's experts into one shared base."),
    "decompose": ("stage", "Stage 2: experts into base and deltas, without loss."),
    "svd-compress": ("stage", "Stage 3: make the deltas low-rank."),
    "prune-base": ("stage", "Stage 4: prune intermediate channels of the base."),
    "quantize-delta": ("stage", "Store deltas, or their low-rank factors, quantized."),
    "sparsify-delta": ("stage", "Store deltas sparse."),
    "export": ("stage", "Back to the original layout, for any engine; or to a dense model (--format dense)."),
    "eval": ("evaluate", "Perplexity of models on a text, and their scores on tasks."),
    "compare": ("compare", "Several methods at several ratios on one table: bytes, loss, KL, time, memory."),
    "generate": ("generate", "Let a model go on after a prompt, or answer it."),
    "chat": ("chat", "Talk with a model, which answers as it generates."),
    "serve": ("serve", "Serve a model to programs, by OpenAI's API."),
    "routing": ("routing", "Which experts a model chooses on which text."),
    "bench": ("bench", "Speed, memory and FLOPs of a model, beside another's: load, prefill, decode."),
    "inspect": ("inspect", "What a checkpoint holds: layers, experts, ranks, parameters, bytes."),
    "report": ("report", "All of a model on one page: how it was made, sizes, quality, layers, routing."),
    "verify": ("verify", "Check a checkpoint's files, and its tensors against the source it was made from."),
    "push": ("push", "Upload a checkpoint to the Hugging Face hub, verified before."),
    "recommend": ("recommend", "What to type so that an MoE model fits into a memory, from its config alone."),
    "doctor": ("doctor", "Check this machine: libraries, memory, disk, compiler, speed."),
    "demo": ("demo", "Train a small model, upcycle it, compress it, evaluate it: two minutes, offline."),
    "list": ("listing", "Known methods, architectures, targets, presets and representations."),
}


# In the order of --help; stages that are not named come last.
COMMAND_GROUPS: dict[str, tuple[str, ...]] = {
    "Make": ("upcycle", "moefy", "tune", "compress", "repair", "export", "push"),
    "Measure": ("eval", "compare", "bench", "routing", "inspect", "verify", "report"),
    "Run": ("chat", "serve", "generate"),
    "Find out": ("demo", "recommend", "doctor", "list"),
    "Compress step by step": ("fisher-merge", "decompose", "svd-compress", "prune-base"),
}


def commands() -> dict[str, tuple[str, str]]:
    """`COMMANDS`, and behind these the other files of `compress/stages`: each is a stage that is called as it is, and
    the first line of its docstring is that of the help. Nothing is imported for it."""
    files = {info.name.replace("_", "-"): info.name for info in pkgutil.iter_modules(stages.__path__)}
    return COMMANDS | {name: ("stage", _docstring(file)) for name, file in files.items() if name not in COMMANDS}


def _docstring(file: str) -> str:
    spec = importlib.util.find_spec(f"{stages.__name__}.{file}")
    assert spec is not None
    assert spec.origin is not None
    return (ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or "").partition("\n")[0]
