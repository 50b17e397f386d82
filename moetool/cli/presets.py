"""Presets: sets of options in YAML files, one per subject; some come along, and users write their own."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from moetool.errors import InvalidInputError, UsageError, did_you_mean


def directory() -> Path:
    """Where those that come along lie: in the package, or in `configs/` of the checkout it is run from."""
    package = Path(__file__).parents[1]
    packaged = package / "presets"
    return packaged if packaged.is_dir() else package.parent / "configs"


@cache
def files() -> dict[Path, dict[str, Any]]:
    """The content of every file, in the order of their names."""
    return {file: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(directory().glob("*.yaml"))}


def presets() -> dict[str, str]:
    """Every preset that comes along by name, as the `FILE.yaml:NAME` that `--preset` takes as well."""
    return {name: f"{file}:{name}" for file, content in files().items() for name in content.get("variants", {})}


def presets_for(command: str, method: str | None) -> list[str]:
    """The names of those that come along for a command, and for its method if that is known."""
    fitting = [content for content in files().values() if content.get("command") == command]
    if method is not None:
        fitting = [content for content in fitting if content.get("method", method) == method]
    return [name for content in fitting for name in content.get("variants", {})]


def preset_options(preset: str | None, command: str, method: str | None = None) -> dict[str, Any]:
    """The options of a preset: a name of `presets()`, `FILE.yaml` or `FILE.yaml:VARIANT`.

    A file names its `command` (and `method`), gives `options`, and may have `variants` that override some of them.

    Raises:
        UsageError: there is no such preset.
        InvalidInputError: no such file or variant, not a preset, or one for another command.
    """
    if preset is None:
        return {}
    file, variant, content = _load(preset)
    if not isinstance(content, dict) or not isinstance(content.get("options"), dict):
        raise InvalidInputError(f"{file} is not a preset: it needs a mapping `options`.")
    if unknown := set(content) - {"command", "method", "description", "options", "variants"}:
        raise InvalidInputError(f"{file} has entries that a preset does not have: {', '.join(sorted(unknown))}.")
    if content.get("command") != command:
        raise InvalidInputError(f"{file} is a preset for `moetool {content.get('command')}`, not for `{command}`.")
    if content.get("method", method) != method:
        raise InvalidInputError(f"{file} is a preset for --method {content['method']}, not for {method or command}.")
    variants = content.get("variants") or {}
    if not isinstance(variants, dict) or not all(isinstance(options, dict) for options in variants.values()):
        raise InvalidInputError(f"The variants of {file} are not a mapping from names to options.")
    if variant and variant not in variants:
        there = f"there are {', '.join(variants) or 'none'}.{did_you_mean(variant, variants)}"
        raise InvalidInputError(f"{file} has no variant '{variant}'; {there}")
    return {**content["options"], **(variants[variant] if variant else {})}


def preset_method(preset: str | None) -> str | None:
    """The method that a preset is for, if it says so. Raises as `preset_options` does for what cannot be read."""
    content = None if preset is None else _load(preset)[2]
    return content.get("method") if isinstance(content, dict) else None


def _load(preset: str) -> tuple[str, str, Any]:
    """File, variant (empty for none) and content."""
    reference = presets().get(preset, preset)
    file, _, variant = reference.rpartition(":") if ":" in Path(reference).name else (reference, "", "")
    path = Path(file)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        hint = did_you_mean(preset, presets()) or f" There are {', '.join(presets())}."
        raise UsageError(f"No preset '{preset}' (`moetool list presets` shows all), and no file FILE.yaml.{hint}")
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidInputError(f"--preset {file}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInputError(f"--preset {file} is not valid YAML: {' '.join(str(error).split())}.") from error
    return file, variant, content
