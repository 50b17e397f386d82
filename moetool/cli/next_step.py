"""The last line of a command, on stderr: a whole command line that can be typed next, and that this machine can run."""

import importlib.util
import shlex
import shutil
import socket
import sys
import webbrowser
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from moetool.calibration.data import BUNDLED, parse_data
from moetool.checkpoint.manifest import manifest_of
from moetool.checkpoint.names import has_vocabulary
from moetool.checkpoint.source import is_here, looks_local, model_name
from moetool.cli.names import steps
from moetool.format.gguf.words import IMATRIX, MODEL, TENSOR_TYPES
from moetool.job.options import Options
from moetool.job.result import Result
from moetool.stages import stages

PROMPT = "The first thing to do is"
_WINDOWS = 64  # of a text: enough for two digits
_TRAINING = 10  # times the weight files' size: memory that training a model in 16 bits takes
_REPAIRING = 20  # times the weight files' size: memory that training all of a model in 16 bits by copies in fp32 takes
_RUNNING = 4  # times the weight files' size: memory that running two models in fp32 takes


def after_stage(command: str, result: Result, options: Options | None = None, *, trains: bool = True) -> str:
    """The command that most users type after one that has written `result.output`.

    Args:
        command: as it was typed: `upcycle`, `compress` …
        result: of it.
        options: that it ran with; its text is where the next command gets one from.
        trains: whether the result can be tuned, which encoders cannot.
    """
    given, made = result.input, result.output
    if made.startswith("-"):
        made = f"./{made}"  # else it would be taken for an option
    text = getattr(options, "calibration", None)
    specs = () if text is None else parse_data(text)
    # What the model wrote itself is gone, and only calibration weighs texts.
    text = None if any(spec.is_self for spec in specs) else ",".join(spec.written for spec in specs) or None
    size = 0 if result.sizes is None else max(result.sizes.bytes_before, result.sizes.bytes_after)
    if result.stage == "gguf":
        return after_gguf(Path(made)) or line("verify", made)
    if (file := Path(made) / MODEL).exists():
        made = str(file)  # of repair, whose input was such a file
    if result.stage == "mlx":
        runs = shutil.which("mlx_lm.generate") and not _lacks_tokenizer(made)
        return shlex.join(["mlx_lm.generate", "--model", made, "--prompt", PROMPT]) if runs else line("verify", made)
    if result.stage == "compressed-tensors":
        return line("verify", made) if _lacks_tokenizer(made) else _after_packing(made)
    if (then := stages()[result.stage].next_command) is not None:
        return line(*(_filled(word, given, made) for word in then.split()))
    if command == "upcycle" and trains and text is not None and _fits(_TRAINING * size):
        return line("tune", made, _new(made, "tuned"), "--data", text)
    if not trains or _lacks_tokenizer(made) or not _fits(_RUNNING * size):
        return line("report", made)
    manifest, skips = manifest_of(Path(made)), getattr(options, "keep", 0) < 1
    is_repaired = manifest is not None and manifest.recipe.get("stage") == "repair"
    if command == "moefy" and skips and not is_repaired and _fits(_REPAIRING * size):
        return line("repair", made, _new(made, "repaired"), "--to", given, *(("--calibration", text) if text else ()))
    if text is not None and command not in ("upcycle", "moefy"):
        windows = ("--sequence-length", str(typed)) if (typed := _typed_length(options)) else ()
        original = getattr(options, "to", None) or _original(made, given)  # repair's own, or that of all steps
        seen = line("eval", made, "--data", text, *windows, "--windows", str(_WINDOWS), "--against", original)
        return f"{seen}    # text of its calibration: it may lose more on other text"
    if command == "compress" or command in steps():
        seen = line("eval", made, "--data", BUNDLED, "--windows", "8", "--against", _original(made, given))
        return f"{seen}    # what it lost, by kind of text; on other text it may lose more"
    return line("generate", made, PROMPT)


def _original(made: str, given: str) -> str:
    """What the first of the steps read that in a row led to a model, if it is still there; else the last one's
    input."""
    manifest = manifest_of(Path(made))
    origins = () if manifest is None else manifest.origins
    chain = [origin.source for origin in takewhile(lambda origin: origin.stage in steps(), origins)]
    return chain[-1] if chain and (is_here(chain[-1]) or not looks_local(chain[-1])) else given


def _typed_length(options: Options | None) -> int | None:
    """Tokens per window if they were typed: the text may be too short for more."""
    is_typed = options is not None and "sequence_length" in options.model_fields_set
    return getattr(options, "sequence_length", None) if is_typed else None


def _lacks_tokenizer(model: str) -> bool:
    return Path(model).is_dir() and not has_vocabulary(Path(model))


def _filled(word: str, given: str, made: str) -> str:
    """Fill the placeholders of a word of `Stage.next_command` with paths."""
    filled = word.format(input=given, output=made, new=made.rstrip("/"))
    return _free(filled) if "{new}" in word else filled


def after_gguf(made: Path) -> str | None:
    """The program of llama.cpp that takes the file and what was measured for it; `generate` or `chat`, where there is
    none; `None` where these cannot run the file either."""
    from moetool.checkpoint.gguf_model import GgufModel  # torch: seconds, and not for --help

    file = GgufModel(made / MODEL)
    if not file.has_tokenizer:
        return None
    known = {"--imatrix": made / IMATRIX, "--tensor-type-file": made / TENSOR_TYPES}
    told = [word for option, file in known.items() if file.exists() for word in (option, str(file))]
    if told and shutil.which("llama-quantize"):
        smaller = _new(str(made / MODEL).removesuffix(".gguf"), "q4_k_m.gguf")
        return shlex.join(["llama-quantize", *told, str(made / MODEL), smaller, "Q4_K_M"])
    if shutil.which("llama-cli"):
        return shlex.join(["llama-cli", "-m", str(made / MODEL), "-p", PROMPT])
    if file.is_read:
        return line("generate", str(made / MODEL), PROMPT)
    return line("chat", str(made)) if importlib.util.find_spec("llama_cpp") else None


def _after_packing(made: str) -> str:
    """A server for packed experts, where vLLM is installed; else what can be done with them here."""
    if shutil.which("vllm"):
        return shlex.join(["vllm", "serve", made])
    reads = importlib.util.find_spec("compressed_tensors") is not None
    return line("generate", made, PROMPT) if reads else line("verify", made)


def after_page(page: Path) -> str:
    """The command that shows a page: in a browser, or else one that fetches it to where a browser is."""
    try:
        webbrowser.get()
    except webbrowser.Error:
        return f"scp {shlex.quote(f'{socket.gethostname()}:{page.absolute()}')} .    # on a machine with a browser"
    return shlex.join([sys.executable, "-m", "webbrowser", page.absolute().as_uri()])


def without_dry_run(command: str, arguments: Sequence[str]) -> str:
    """Return the command line that was typed, without `--dry-run`."""
    return line(command, *(word for word in arguments if word != "--dry-run"))


def here(model: str, suffix: str) -> str:
    """A name in this directory, for what is made of a model that may lie where nothing can be written."""
    return _new(model_name(model), suffix)


def _new(path: str, suffix: str) -> str:
    return _free(f"{path.rstrip('/')}-{suffix}")


def _free(wanted: str) -> str:
    """A path that does not exist: the wanted one, or numbered."""
    number, name = 1, wanted
    while Path(name).exists():
        number, name = number + 1, f"{wanted}-{number + 1}"
    return name


def _fits(needed: int) -> bool:
    from moetool.runtime.memory import free_bytes  # torch: seconds, and not for --help

    return needed <= free_bytes()


def line(*arguments: str) -> str:
    """Return a shell line that runs moetool with these arguments, quoted and spelled as it was started here."""
    return f"{program()} {shlex.join(arguments)}"


def tell(what: str) -> None:
    """Print the suggestion of a next command as the last line on stderr."""
    print(f"next: {what}", file=sys.stderr)


def program() -> str:
    """The command by which this shell can call moetool: its name if that is on the path, else how it was called."""
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
