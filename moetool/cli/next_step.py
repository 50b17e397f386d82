"""What to type next: the last line of a command, on stderr, so that stdout holds the result alone."""

import shlex
import shutil
import sys
from pathlib import Path

from moetool.format.gguf import IMATRIX, MODEL, TENSOR_TYPES
from moetool.job.result import Result

# What a name in capitals stands for is the reader's to say.
_TEXT, _OUT, _SMALL = "TEXT", "OUT", "SMALL.gguf"
_EXPORTS = {"dense-experts", "dense", "compressed-tensors"}


def after_stage(command: str, result: Result, *, trains: bool = True) -> str:
    """The command that most users type after one that has written `result.output`.

    Args:
        command: as it was typed: `upcycle`, `compress` …
        result: of it.
        trains: whether the result can be tuned, which encoders cannot.
    """
    given, made = result.input, result.output
    if result.stage == "gguf":
        return _after_gguf(Path(made))
    if result.stage in _EXPORTS:
        return f"vllm serve {shlex.quote(made)}"
    if command == "fisher-merge":
        return line("decompose", given, _OUT, "--base", made)
    if command == "decompose":
        return line("svd-compress", made, _OUT, "--ratio", "0.5", "--calibration", _TEXT)
    if command == "upcycle" and trains:
        return line("tune", made, _OUT, "--data", _TEXT)
    if command == "upcycle":
        return line("eval", made, "--data", _TEXT)
    return line("eval", made, "--data", _TEXT, "--against", given)


def _after_gguf(made: Path) -> str:
    """What llama.cpp makes of a file, and of what was measured for it."""
    known = {"--imatrix": made / IMATRIX, "--tensor-type-file": made / TENSOR_TYPES}
    told = [word for option, file in known.items() if file.exists() for word in (option, str(file))]
    if told:
        return shlex.join(["llama-quantize", *told, str(made / MODEL), _SMALL, "Q4_K_M"])
    return shlex.join(["llama-cli", "-m", str(made / MODEL)])


def line(*arguments: str) -> str:
    """A shell line that runs `moetool ARGUMENTS` from here."""
    return f"{program()} {shlex.join(arguments)}"


def tell(what: str) -> None:
    """Print the last line of a command."""
    print(f"next: {what}", file=sys.stderr)


def program() -> str:
    """How the shell is to call moetool, as far as that can be known."""
    if shutil.which("moetool"):
        return "moetool"
    called = Path(sys.argv[0])
    if called.name != "moetool":  # python -m moetool
        return f"{sys.executable} -m moetool"
    here = called.absolute()
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def try_next(arguments: str) -> list[str]:
    """Shell lines that run `moetool ARGUMENTS` from here, and if the shell does not know it, that make it known."""
    shown = program()
    activate = Path(shown).parent / "activate"
    if Path(shown).name != "moetool" or shown == "moetool" or not activate.is_file():
        return [f"{shown} {arguments}"]
    return [f"source {activate}    # puts moetool on the path; without it, say {shown}", f"moetool {arguments}"]
