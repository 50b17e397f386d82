"""Presets: sets of options in YAML files, one per subject; some come along, and users write their own."""

from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from reprlib import repr  # an alias of an alias of … is short as a file, and not as a message
from typing import Any, TypeGuard

from moetool.checkpoint.source import is_here, looks_local
from moetool.checkpoint.yaml_files import read_yaml
from moetool.errors import InvalidInputError, UsageError, did_you_mean

_ENTRIES = ("command", "method", "description", "options", "variants")


def directory() -> Path:
    """Directory of the presets that come with moetool: in the package, or `configs/` of the checkout it is run from."""
    package = Path(__file__).parents[1]
    packaged = package / "presets"
    return packaged if packaged.is_dir() else package.parent / "configs"


@cache
def files() -> dict[Path, dict[str, Any]]:
    """Read every preset that comes with moetool, by its path, sorted by name."""
    return {file: read_yaml(file, "the preset") for file in sorted(directory().glob("*.yaml"))}


def presets() -> dict[str, str]:
    """Every preset that comes with moetool, by name, as the `FILE.yaml:NAME` that `--preset` takes as well."""
    return {name: f"{file}:{name}" for file, content in files().items() for name in content.get("variants", {})}


def presets_for(command: str, method: str | None) -> list[str]:
    """Names of moetool's own presets for a command, and for its method if that is known."""
    fitting = [content for content in files().values() if content.get("command") == command]
    if method is not None:
        fitting = [content for content in fitting if content.get("method", method) == method]
    return [name for content in fitting for name in content.get("variants", {})]


def preset_options(preset: str | None, command: str, method: str | None) -> dict[str, Any]:
    """The options of a preset: a name of `presets()`, `FILE.yaml` or `FILE.yaml:VARIANT`.

    A file names its `command` (and `method`), gives `options`, and may have `variants` that override some of them.

    Raises:
        UsageError: there is no such preset.
        InvalidInputError: no such file or variant, not a preset, or one for another command.
    """
    if preset is None:
        return {}
    file, variant, content = _load(preset)
    if not isinstance(content, dict) or not _is_options(content.get("options")):
        raise InvalidInputError(f"{file} is not a preset: it needs a mapping `options`, from names to values.")
    if unknown := content.keys() - set(_ENTRIES):
        listed = ", ".join(sorted(map(str, unknown)))
        raise InvalidInputError(
            f"{file} has entries that a preset does not have: {listed}. A preset has {', '.join(_ENTRIES)}."
        )
    for name in ("command", "method"):
        if not isinstance(content.get(name, ""), str):
            raise InvalidInputError(f"{file}: `{name}` is a name, not {repr(content[name])}.")
    if content.get("command") is None:
        raise InvalidInputError(f"{file} does not say which command it is for: it needs an entry `command: {command}`.")
    if content["command"] != command:
        raise InvalidInputError(f"{file} is a preset for `moetool {content['command']}`, not for `{command}`.")
    if content.get("method", method) != method:
        raise InvalidInputError(f"{file} is a preset for --method {content['method']}, not for {method or command}.")
    variants = content.get("variants") or {}
    if not _is_options(variants) or not all(map(_is_options, variants.values())):
        raise InvalidInputError(f"The variants of {file} are not a mapping from names to options.")
    if variant and variant not in variants:
        there = f"there are {', '.join(variants) or 'none'}.{did_you_mean(variant, variants)}"
        raise InvalidInputError(f"{file} has no variant '{variant}'; {there}")
    chosen = {**content["options"], **(variants[variant] if variant else {})}
    return {name.replace("-", "_"): value for name, value in chosen.items()}


def explaining(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command with an option `preset`: an error over a value of the preset says that it is the preset's. Of a
    file that is not there it says from where a preset's paths are taken, and which file beside it may be meant."""

    @wraps(command)
    def wrapper(*, preset: str | None = None, **arguments: object) -> None:
        try:
            command(preset=preset, **arguments)
        except (UsageError, InvalidInputError) as error:
            note = (
                ""
                if preset is None
                else _about_paths(preset, str(error)) or _about_option(preset, str(error), arguments)
            )
            if not note:
                raise
            raise type(error)(f"{error} {note}") from error

    return wrapper


def _about_option(preset: str, said: str, typed: dict[str, object]) -> str:
    """What to add to an error that begins with an option of a preset which was not typed; nothing to any other."""
    _, variant, content = _load(preset)
    if not isinstance(content, dict):
        return ""
    variants = content.get("variants")
    for options in (content.get("options"), variants.get(variant) if isinstance(variants, dict) else None):
        for name in options if _is_options(options) else ():
            option = f"--{name.replace('_', '-')}"
            if said.startswith(f"{option} ") and typed.get(name.replace("-", "_")) is None:
                return f"It is of the preset {preset}: type {option} to replace it."
    return ""


def _about_paths(preset: str, said: str) -> str:
    """What to add to an error that names a file of a preset which is not there; nothing to any other."""
    file, _, content = _load(preset)
    if not isinstance(content, dict):
        return ""
    for name in _names_in(content):
        beside = str(Path(file).parent / name)
        if name not in said or is_here(name):
            continue
        if is_here(beside):
            return f"A preset's paths are taken from where the command is typed. {beside} is there."
        if looks_local(name) or Path(name).suffix:
            return "A preset's paths are taken from where the command is typed."
    return ""


def _names_in(content: dict[str, Any]) -> Iterator[str]:
    """Every name of a file or model that the options of a preset and of its variants may hold, without the parts and
    weights of texts (`text.jsonl:::said@2,other.txt`)."""
    variants = content.get("variants")
    parts = [content.get("options"), *(variants.values() if isinstance(variants, dict) else ())]
    for value in (value for part in parts if isinstance(part, dict) for value in part.values()):
        for one in value if isinstance(value, list) else [value]:
            texts = [text for text in (one.values() if isinstance(one, dict) else [one]) if isinstance(text, str)]
            names = (name.partition("@")[0].partition(":")[0].strip() for text in texts for name in text.split(","))
            yield from filter(None, names)


def _is_options(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def preset_method(preset: str, command: str) -> str | None:
    """The method of a command that a preset is for, if it says so. Raises as `preset_options` does for what cannot be
    read."""
    content = _load(preset)[2]
    method = content.get("method") if isinstance(content, dict) and content.get("command") == command else None
    return method if isinstance(method, str) else None


def _load(preset: str) -> tuple[str, str, Any]:
    """Read a preset: its file, its variant (empty for none) and its content."""
    reference = presets().get(preset, preset)
    file, _, variant = reference.rpartition(":") if ":" in Path(reference).name else (reference, "", "")
    path = Path(file)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        hint = did_you_mean(preset, presets())
        raise UsageError(
            f"No preset is called '{preset}' (`moetool list presets` shows all); a file's name ends in .yaml.{hint}"
        )
    return file, variant, read_yaml(path, "the preset")
