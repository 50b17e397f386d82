"""Model card of a result: its `README.md`, for people and for the hub.

What it says of licence, language and the like is what the source's card says, and nothing where that is silent. The
same run gives the same bytes: no times, and of what is local names alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from moetool.architectures.base import Settings
from moetool.architectures.dense import is_encoder
from moetool.architectures.described import language_model_class
from moetool.calibration.mixing import ONE_KIND
from moetool.checkpoint.files import copy_file, file_sha256
from moetool.checkpoint.manifest import ExpertOrigin, Manifest, Origin, manifest_of
from moetool.checkpoint.names import CARD
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import settings_of
from moetool.checkpoint.sizes import format_bytes, format_change
from moetool.checkpoint.source import is_here, looks_local, model_name
from moetool.errors import MoetoolError, option_of
from moetool.format.marker import METHOD, moetool_entry
from moetool.format.mlx import is_mlx
from moetool.job.options import RunOptions, context_length
from moetool.serving.filling import needs_decoding, served_layouts

SOURCE_CARD = "moetool/source-README.md"

# Fields of a card that hold for what is made of a model, too.
_INHERITED = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
_BASE = "base_model"
# What stages make of a model, in words for titles; of others, which are methods, the name.
_OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "gguf": "in GGUF",
        "mlx": "for MLX",
        "compressed-tensors": "in compressed-tensors",
        "dense": "as a dense model",
        "dense-experts": "with its experts as plain matrices",
        "tune": "fine-tuned",
        "repair": "trained to predict as its original",
    }
)
_LOST = {"relative_error": "error relative to the delta", "lost_energy": "share of the delta's energy that was cut off"}


def chosen_options(options: RunOptions, recipe: Mapping[str, object], config: Settings) -> dict[str, object]:
    """The options in a recipe that are not at their defaults, with the names alone of local files. Windows as long as
    the context that `config` tells are by default."""
    defaults = {
        name: json.loads(json.dumps(field.default, default=str)) if not field.is_required() else ...
        for name, field in type(options).model_fields.items()
    }
    length = defaults.get("sequence_length")
    if isinstance(length, int) and (context := context_length(config)) is not None:
        defaults["sequence_length"] = min(length, context)
    return {name: public(value) for name, value in recipe.items() if name in defaults and value != defaults[name]}


def public(value: object) -> object:
    """A value as it may be told to anybody: what is a path here is its last part."""
    if isinstance(value, str):
        return ",".join(map(_public_name, value.split(",")))
    if isinstance(value, Mapping):
        return {key: public(inner) for key, inner in value.items()}
    return [public(inner) for inner in value] if isinstance(value, list | tuple) else value


def _public_name(name: str) -> str:
    if name and (looks_local(name) or is_here(name.partition("@")[0].partition(":")[0])):
        return model_name(name)
    return name


def keep_source_card(checkpoint: Checkpoint, directory: Path) -> list[Path]:
    """Copy the card of a source that moetool did not write, or somebody has changed, to where it cannot pretend to
    describe the result; returns the copy."""
    card = checkpoint.path / CARD
    if not card.is_file() or _is_ours(checkpoint):
        return []
    return [copy_file(card, directory / SOURCE_CARD)]


def _is_ours(checkpoint: Checkpoint) -> bool:
    manifest = manifest_of(checkpoint.path)
    return (
        manifest is not None and manifest.has_card and manifest.files.get(CARD) == file_sha256(checkpoint.path / CARD)
    )


def model_card(
    manifest: Manifest,
    source: Checkpoint,
    model: tuple[Mapping[str, object], int] | None,
    *,
    has_source_card: bool = False,
) -> str:
    """The text of a card.

    Args:
        manifest: of the result; its digests are not looked at.
        source: what it was made from.
        model: `config.json` of the result and bytes of its weight files; `None` for what is no model.
        has_source_card: whether the source's own card lies beside it as `SOURCE_CARD`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    facts = _inherited(source)
    for_mlx = model is not None and is_mlx(model[0])
    data = ModelCardData(library_name="mlx" if for_mlx else "transformers", tags=["moetool"])
    for field, value in facts.items():
        data[field] = value
    steps = [_step(origin) for origin in reversed(manifest.origins)]
    sections = [
        f"# {_title(manifest)}",
        "This card was written by moetool. Add to it whatever readers should know.",
        "## What was done",
        "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1)),
        *_circumstances(manifest),
    ]
    if has_source_card:
        sections.append(
            f"[{SOURCE_CARD}]({SOURCE_CARD}) is the card of the model that this was made of, and describes that one."
        )
    if len(set(origins := manifest.provenance.experts)) > 1:
        sections += ["## Experts", "\n".join(_experts(origins))]
    if "license" not in facts:
        sections.append("No licence is named here, since the source's card names none that a program can read.")
    if types := [f"- layer {layer}: {_types(said)}" for layer, said in manifest.layers.items() if "types" in said]:
        sections += ["## Types of tensors", "\n".join(types)]
    if model is not None:
        sections += _of_model(manifest, source, *model)
    elif not types:
        sections.append("This is no model, but what `moetool decompose --base` asks for.")
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")
    return str(card)


def _inherited(source: Checkpoint) -> dict[str, str | list[str]]:
    """Of the front matter of a source's card what holds for the result; and the source itself, where it has a public
    name."""
    said = _front_matter(source.path / CARD)
    if not is_here(source.source) and not looks_local(source.source):
        said[_BASE] = source.source
    facts: dict[str, str | list[str]] = {}
    for name in (_BASE, *_INHERITED):
        value = said.get(name)
        if isinstance(value, str) and value:
            facts[name] = value
        elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            facts[name] = [str(part) for part in value]
    return facts


def _front_matter(card: Path) -> dict[str, object]:
    """The fields at the beginning of a card, all scalars as text; empty if there are none that can be read."""
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        found = REGEX_YAML_BLOCK.search(card.read_text(encoding="utf-8-sig"))
        # Not `safe_load`, to which the language `no` is false. This loader knows nothing but text, lists and mappings.
        content = yaml.load(found[2], yaml.BaseLoader) if found else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return dict(content) if isinstance(content, dict) else {}


def _title(manifest: Manifest) -> str:
    """What a result is, for somebody who does not know moetool: the first source, and what it has become."""
    *before, last = [_OUTCOMES.get(origin.stage, f"after {origin.stage}") for origin in reversed(manifest.origins)]
    kind = (manifest.chosen or {}).get("type")
    if isinstance(kind, str):
        written = {own for said in manifest.layers.values() for own in _types_of(said).values()}
        are_chosen = bool(written) and kind.lower() not in written
        last += f" ({'types chosen, as large as ' if are_chosen else ''}{kind.upper()})"
    return f"{_code(_public_name(manifest.origins[-1].source))} {', '.join([*before, last])}"


def _step(origin: Origin) -> str:
    step = f"{_code(origin.stage)} of {_code(_public_name(origin.source))}"
    if origin.chosen is None:
        return f"{step}, by an older moetool, which did not note what was chosen"
    options = " ".join(_option(name, value) for name, value in origin.chosen.items())
    return f"{step}: {_code(options)}" if options else step


def _option(name: str, value: object) -> str:
    if isinstance(value, bool):
        return option_of(name if value else f"no_{name}")
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        return f"{option_of(name)} {','.join(map(str, value))}"
    return f"{option_of(name)} {value if isinstance(value, str | int | float) else json.dumps(value)}"


def _experts(origins: Sequence[ExpertOrigin | None]) -> Iterator[str]:
    """Lines that say which model each expert came from, the experts of one model together."""
    names = [None if origin is None else origin.model for origin in origins]
    for name in dict.fromkeys(names):
        numbers = [str(number) for number, own in enumerate(names) if own == name]
        whence = "not recorded" if name is None else _code(_public_name(name))
        yield f"- expert{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {whence}"


def _circumstances(manifest: Manifest) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"All other options have their defaults. Seed {manifest.seed}."
    yield f"Versions: moetool {manifest.moetool_version}, {versions}."
    text, facts = (manifest.chosen or {}).get("calibration"), manifest.statistics.get("calibration")
    if isinstance(text, str) and isinstance(facts, Mapping):
        windows = facts.get("text")
        which = f"{_code(windows)}," if windows else f"{_code(text)}: {facts['windows']} windows,"
        yield f"Calibrated on {which} {facts['tokens']} tokens."
        if len(facts.get("kinds") or ()) == 1:
            yield ONE_KIND


def _of_model(manifest: Manifest, source: Checkpoint, config: Mapping[str, object], nbytes: int) -> Iterator[str]:
    given = source.weight_bytes
    original = (moetool_entry(source.config) or {}).get("original_bytes", given)
    assert isinstance(original, int)
    rows = [("original", original)] if original != given else []
    rows += [(f"source{source.in_format}", given), ("this model", nbytes)]
    yield "## Size"
    yield "| | weight files |\n|---|---|\n" + "\n".join(f"| {name} | {format_bytes(size)} |" for name, size in rows)
    yield f"{format_change(1 - nbytes / original)} than the {rows[0][0]}."
    measured = [*_measured(manifest)]
    measured.append("`moetool eval MODEL --data TEXT --against SOURCE` measures what it loses on held-out text.")
    yield "## Measured"
    yield "\n".join(f"- {line}" for line in measured)
    yield "## Loading"
    yield from _loading(config)
    yield "## Limits"
    yield "\n".join(f"- {line}" for line in _limits(config))


def _types(said: Mapping[str, object]) -> str:
    """Types of a layer's tensors in one line, those in fp32 left out."""
    types = _types_of(said).items()
    return ", ".join(f"{name.removesuffix('.weight')} {kind}" for name, kind in types if kind != "f32")


def _types_of(said: Mapping[str, object]) -> Mapping[str, object]:
    """The type of each tensor of a layer, by what is said of it; empty for results without chosen types."""
    types = said.get("types", {})
    assert isinstance(types, Mapping)
    return types


def _measured(manifest: Manifest) -> Iterator[str]:
    facts = manifest.statistics.get("calibration")
    if isinstance(facts, Mapping) and isinstance(loss := facts.get("loss"), float):
        yield f"The source's loss on the calibration text: {loss:.4f} nats per token."
    for field, what in _LOST.items():
        values = [number for said in manifest.layers.values() for number in _numbers(said.get(field))]
        if values:
            yield f"Mean {what}, over layers, roles and experts: {sum(values) / len(values):.4f}."


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


def _loading(config: Mapping[str, object]) -> Iterator[str]:
    if is_mlx(config):
        yield "```sh\npip install mlx-lm\nmlx_lm.chat --model MODEL\n```"
        yield "`MODEL` is this directory, or the id under which it was shared. Nothing of moetool is needed."
        return
    model_type = config.get("model_type")
    auto = "AutoModelForMaskedLM" if is_encoder(config) else language_model_class(model_type).__name__
    ours = "import moetool  # teaches transformers to load it\n" if moetool_entry(config) is not None else ""
    yield (
        f"```python\n{ours}from transformers import {auto}, AutoTokenizer\n\n"
        f'model = {auto}.from_pretrained("MODEL", device_map="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("MODEL")\n```'
    )
    if ours:
        yield "`MODEL` is this directory, or the id under which it was shared; moetool has to be installed."
    else:
        yield "`MODEL` is this directory, or the id under which it was shared. Nothing of moetool is needed."


def _limits(config: Mapping[str, object]) -> Iterator[str]:
    entry, kind = config.get("quantization_config"), _code(str(config.get("model_type")))
    if (own := moetool_entry(config)) is not None:
        yield (
            "transformers loads it where moetool is installed, and refuses it elsewhere. SGLang, TGI, llama.cpp and "
            "other engines cannot load it; `moetool export` writes what they can, for families that they know."
        )
        yield _in_vllm(config)
        layers = own.get("layers")
        if isinstance(layers, Mapping) and any(
            isinstance(layer, Mapping) and layer.get("dynamic_channels") for layer in layers.values()
        ):
            yield "Channels are skipped for each batch: what it computes for a token depends on the others."
    elif is_mlx(config):
        yield "It is in the format of MLX, on Apple silicon: transformers and other engines cannot load it."
    elif isinstance(entry, Mapping):
        yield (
            f"It is in the format of {_code(str(entry.get('quant_method')))}: transformers loads it where that library "
            f"is installed, other engines where they read the format for {kind}."
        )
    else:
        yield f"It is an ordinary checkpoint of the family {kind}: engines load it that know this family."
    yield "What the source could not do, or should not be used for, holds for this model, too."


def _in_vllm(config: Mapping[str, object]) -> str:
    """What becomes of it there, by moetool's plug-in."""
    settings = settings_of(config, Path())
    try:
        served_layouts(settings, decodes=True)
    except MoetoolError as error:
        return f"vLLM cannot load it. {error}"
    decoding = f" --load-format {METHOD}" if needs_decoding(settings) else ""
    return (
        "vLLM loads it where moetool is installed beside it (`pip install 'moetool[vllm]'`): `vllm serve MODEL "
        f"--enforce-eager{decoding}`. Such models were run by vLLM 0.32 on a CPU, and not on a card."
    )


def _code(text: str) -> str:
    """Text of any kind as code within a line of Markdown."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"
