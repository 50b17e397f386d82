"""Options and commands as other tools name them, or other commands of moetool, and what is meant by them here."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

# By the other's name without dashes, ours in order of preference: the first that a command has is meant. Some are names
# that the option has in another command.
_OURS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bytes": ("--size",),
        "target-size": ("--size", "--ratio"),
        "target-bpw": ("--size", "--ratio"),
        "compression-ratio": ("--ratio",),
        "sparsity": ("--ratio", "--drop"),
        "bits": ("--ratio", "--type"),
        "wbits": ("--bits", "--ratio"),
        "bit": ("--bits", "--ratio"),
        "scheme": ("--bits", "--ratio", "--type"),
        "group": ("--group-size",),
        "groupsize": ("--group-size",),
        "algorithm": ("--method",),
        "quant-method": ("--method",),
        "merge-method": ("--method", "--merge"),
        "format": ("--method",),
        "outtype": ("--type",),
        "qtype": ("--type",),
        "imatrix": ("--calibration",),
        "dataset": ("--calibration", "--data"),
        "dataset-name": ("--calibration", "--data"),
        "train-file": ("--data",),
        "text": ("--calibration", "--data"),
        "held-out": ("--data", "--text"),
        "calib": ("--calibration",),
        "calibration-dataset": ("--calibration",),
        "data": ("--calibration", "--text"),
        "calibration": ("--data", "--text"),
        "samples": ("--windows",),
        "windows": ("--samples",),
        "nsamples": ("--samples", "--windows"),
        "num-samples": ("--samples", "--windows"),
        "num-calibration-samples": ("--samples",),
        "limit": ("--windows",),
        "seqlen": ("--sequence-length",),
        "seq-len": ("--sequence-length",),
        "max-seq-length": ("--sequence-length",),
        "max-length": ("--sequence-length", "--max-new-tokens", "--max-tokens"),
        "sequence-length": ("--lengths",),
        "lengths": ("--sequence-length",),
        "batch": ("--batch-size", "--batch-tokens"),
        "batch-size": ("--batch", "--batch-tokens"),
        "batch-tokens": ("--batch-size", "--batch"),
        "context": ("--sequence-length",),
        "ctx-size": ("--sequence-length", "--context"),
        "iters": ("--refine", "--steps"),
        "max-steps": ("--steps",),
        "lr": ("--learning-rate",),
        "num-experts": ("--experts",),
        "num-experts-per-tok": ("--top-k",),
        "experts-per-token": ("--top-k",),
        "dtype": ("--compute-dtype",),
        "torch-dtype": ("--compute-dtype",),
        "precision": ("--compute-dtype",),
        "device-map": ("--device",),
        "gpu": ("--device",),
        "max-memory": ("--memory",),
        "force": ("--overwrite",),
        "yes": ("--overwrite",),
        "config": ("--preset",),
        "recipe": ("--preset",),
        "prompt": ("PROMPT",),
        "n-predict": ("--max-new-tokens", "--max-tokens"),
        "max-tokens": ("--max-new-tokens", "--new-tokens"),
        "max-new-tokens": ("--max-tokens", "--new-tokens"),
        "new-tokens": ("--max-new-tokens", "--max-tokens"),
        "original": ("--against", "--to"),
        "against": ("--to",),
        "teacher": ("--to",),
        "to": ("--against", "--teacher"),
        "n-ctx": ("--context",),
        "max-model-len": ("--context",),
        "system-prompt": ("--system",),
    }
)
# By the other's name of a command, what to type here.
_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "quantize": "compress --method quantize",
        "prune": "compress --method reap",
        "oneshot": "compress",
        "shrink": "compress",
        "distill": "repair` or, for other models, `moetool tune",
        "train": "tune",
        "finetune": "tune",
        "fine-tune": "tune",
        "sft": "tune",
        "merge": "upcycle --method branch-train-mix` or, for experts, `moetool compress --method m-smoe",
        "convert": "export` or, for a dense model, `moetool upcycle",
        "moe": "upcycle",
        "info": "inspect",
        "show": "inspect",
        "stats": "inspect",
        "perplexity": "eval",
        "ppl": "eval",
        "benchmark": "bench",
        "run": "generate` or `moetool chat",
        "upload": "push",
        "plan": "recommend",
        "env": "doctor",
    }
)
# By what somebody may call it, the whole command line for it here.
_LINES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("add-expert", "add-experts"), "upcycle MOE OUTPUT --method add-expert --source DENSE"),
        **dict.fromkeys(
            ("drop-expert", "drop-experts", "remove-expert", "remove-experts"),
            "compress MOE OUTPUT --method drop-experts --drop 3,5",
        ),
    }
)
# By command, the options that set the size of what it writes; a method or format of it has some of them.
_SIZING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compress": ("--bits", "--drop"),
        "export": ("--size", "--bits"),
        "quantize-delta": ("--bits",),
        "sparsify-delta": ("--drop",),
    }
)
_NAMED = 3  # commands with an option that a message names
_INPUT = ("model", "model-name-or-path", "input", "base-model", "model-id", "pretrained")
_OUTPUT = ("output", "output-dir", "out", "save-path", "outfile", "save-dir")


def ours(command: str, option: str, known: Collection[str], arguments: Collection[str]) -> str:
    """A sentence on what an option of another tool or command is here, to end a message with; nothing if no such is
    known.

    Args:
        command: its name.
        option: as it was typed, with its dashes.
        known: options of the command.
        arguments: of the command, in capitals.
    """
    name = option.lstrip("-").replace("_", "-").lower()
    for names, argument in ((_INPUT, ("INPUT", "MODEL")), (_OUTPUT, ("OUTPUT",))):
        if name in names and (found := next((own for own in argument if own in arguments), None)):
            return f" {found} is typed without a name: `moetool {command} {' '.join(arguments)}`."
    if (line := _LINES.get(name)) is not None:
        return f" Here it is `moetool {line}`."
    there = {*known, *arguments}
    found = next((own for own in _OURS.get(name, ()) if own in there), None)
    return f" Here it is {found}." if found else ""


def sizing(command: str, option: str, known: Collection[str]) -> str:
    """A sentence on which option sets the size where there is no `--ratio` or `--size`, to end a message with; nothing
    for any other option, or where none does. The arguments are those of `ours`."""
    if option not in ("--ratio", "--size"):
        return ""
    found = next((own for own in _SIZING.get(command, ()) if own in known), None)
    return f" Here {found} sets the size." if found else ""


def belongs_to(commands: Sequence[str]) -> str:
    """A sentence on which commands have an option, to end a message with; nothing if none has."""
    named = ", ".join(f"`moetool {name}`" for name in commands[:_NAMED])
    return f" It is an option of {named}{' and others' * (len(commands) > _NAMED)}." if named else ""


def command_here(name: str) -> str:
    """A sentence on what a command of another tool is here; nothing if no such is known."""
    if name.lower() == "download":
        return " None is needed: every command takes a name on the hub, such as mistralai/Mixtral-8x7B-v0.1."
    found = _COMMANDS.get(name.lower()) or _LINES.get(name.lower())
    return f" Here it is `moetool {found}`." if found else ""
