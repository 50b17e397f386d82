"""Names of the commands, where each is defined, and its line of `moetool --help`."""

import ast
import importlib.util
import pkgutil
from pathlib import Path

from moetool.compress import stages

# Name → (module with a function `build(name, arguments)`, one line for --help).
COMMANDS: dict[str, tuple[str, str]] = {
    "upcycle": ("stage", "Turn a dense model into an MoE model, or add an expert to one (--method add-expert)."),
    "moefy": ("stage", "Split a dense model's FFNs into experts and skip most of them, without training."),
    "tune": ("stage", "Fine-tune on instructions or text, with a load-balancing loss for MoE models."),
    "compress": ("stage", "Make an MoE model smaller, by what loses least (or by --method d2moe …)."),
    "repair": ("stage", "Train a compressed model or a GGUF file to predict what its original does, at the same size."),
    "fisher-merge": ("stage", "Stage 1: merge each layer's experts into one shared base."),
    "decompose": ("stage", "Stage 2: experts into base and deltas, without loss."),
    "svd-compress": ("stage", "Stage 3: make the deltas low-rank."),
    "prune-base": ("stage", "Stage 4: prune intermediate channels of the base."),
    "quantize-delta": ("stage", "Store deltas, or their low-rank factors, quantized."),
    "sparsify-delta": ("stage", "Store deltas sparse."),
    "export": (
        "stage",
        "Write a model for other engines (--format): GGUF, MLX, compressed-tensors, its own layout, dense.",
    ),
    "eval": ("evaluate", "Measure perplexity on a text, loss against the original, and scores on tasks."),
    "compare": ("compare", "Compress by several methods and ratios, for one table of size, loss, KL, time and memory."),
    "generate": ("generate", "Continue a prompt, or answer it."),
    "chat": ("chat", "Talk with a model."),
    "serve": ("serve", "Serve a model to programs by OpenAI's API."),
    "routing": ("routing", "Show which experts a model chooses on which text."),
    "bench": ("bench", "Measure speed, memory and FLOPs of a model, beside another's: load, prefill, decode."),
    "inspect": ("inspect", "Show what a checkpoint holds: layers, experts, ranks, parameters, bytes."),
    "report": ("report", "Write one HTML page about a model: how it was made, sizes, quality, layers, routing."),
    "verify": ("verify", "Check a checkpoint's files, and its tensors against the source it was made from."),
    "push": ("push", "Verify a checkpoint, and upload it to the Hugging Face hub."),
    "recommend": ("recommend", "Say which command makes an MoE model fit into a memory, from its config alone."),
    "doctor": ("doctor", "Check this machine: libraries, memory, disk, compiler, speed."),
    "demo": ("demo", "Train a small model, upcycle it, compress it, evaluate it: two minutes, offline."),
    "list": ("listing", "List methods, architectures, targets, presets and representations."),
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
    return COMMANDS | {name: ("stage", _docstring(file)) for name, file in steps().items() if name not in COMMANDS}


def steps() -> dict[str, str]:
    """The files of `compress/stages`, by the names of their commands: steps, several of which compress a model."""
    return {info.name.replace("_", "-"): info.name for info in pkgutil.iter_modules(stages.__path__)}


def _docstring(file: str) -> str:
    spec = importlib.util.find_spec(f"{stages.__name__}.{file}")
    assert spec is not None
    assert spec.origin is not None
    return (ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or "").partition("\n")[0]
