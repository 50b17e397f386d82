"""The description that transformers makes of a `config.json`: its own config, the class of the language model, and the
model without weights, of which the language model may be one part.

The code of a checkpoint (`auto_map`) is never run.
"""

import ast
import contextlib
import copy
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moetool.architectures.base import EXPERT_KEYS, experts_told
from moetool.errors import InvalidInputError, did_you_mean
from moetool.quiet import refused

if TYPE_CHECKING:
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

_PROBE = 7  # tokens of a vocabulary that no model has
_BEFORE = "language_config"  # key of a language model's config in files from before transformers had their classes


def empty_model_of(config: Mapping[str, object]) -> "PreTrainedModel":
    """The language model of a `config.json`, with the towers around it if there are some, on the meta device.

    Raises:
        InvalidInputError: transformers does not know the model type, has no language model of it, or cannot build it.
    """
    import torch

    check_model_type(config)
    model_type = config["model_type"]
    with refused(f"build the {model_type} model that config.json describes"):
        described = transformers_config(config)
        check_language(config, described)
        with torch.device("meta"):
            return language_model_class(model_type).from_config(described)


def check_model_type(config: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for a `config.json` whose model type transformers does not know."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInputError(
            f"Unknown model family: config.json has model_type {model_type!r}; it should name one, such as 'mixtral'."
        )
    if model_type not in CONFIG_MAPPING:
        own = " Code that comes with the checkpoint (auto_map) is never run." if config.get("auto_map") else ""
        hint = did_you_mean(model_type, CONFIG_MAPPING)
        raise InvalidInputError(
            f"Unknown model family {model_type!r}: transformers {transformers.__version__}, which is installed, has no "
            f"such model_type; a newer version may have it.{own}{hint}"
        )


def check_language(config: Mapping[str, object], described: "PreTrainedConfig") -> None:
    """Raise `InvalidInputError` for a model of which transformers has no class that predicts text from tokens, and for
    one whose config says nothing of its language model."""
    model_type = config.get("model_type")
    if (found := class_of(described)) is None:
        raise InvalidInputError(
            f"{model_type} is no language model: transformers has no class of it that predicts the next token from "
            "tokens, alone or beside images."
        )
    if "decoder_input_ids" in inspect.signature(found.forward).parameters:
        raise InvalidInputError(
            f"{model_type} does not predict the next token of a text: it has an encoder that reads one, and a decoder "
            "that writes another."
        )
    _check_language_is_there(config, described)


def class_of(described: "PreTrainedConfig") -> "type[PreTrainedModel] | None":
    """The class of all of a language model, by transformers' config of it; `None` if there is none."""
    classes = language_model_class(described.model_type)._model_mapping
    if type(described) not in classes:
        return None
    found: type[PreTrainedModel] | tuple[type[PreTrainedModel], ...] = classes[type(described)]
    return found[0] if isinstance(found, tuple) else found


def check_language_is_there(config: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for a `config.json` of a model with others around it, if it says nothing of its
    language model, which transformers would then take to be its default one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if str(config.get("model_type")) in CONFIG_MAPPING:
        _check_language_is_there(config, _read(config))


def _check_language_is_there(config: Mapping[str, object], described: "PreTrainedConfig") -> None:
    key = _language_key_in(config, described)
    if key is not None and not config.get(key) and not _takes(described, vocab_size=_PROBE):  # beside it, as in dots3's
        raise InvalidInputError(
            f"config.json of this {config.get('model_type')} model has no {key}, which says what its language model "
            "is. Download it again."
        )


def _language_key_in(config: Mapping[str, object], described: "PreTrainedConfig") -> str | None:
    """The key of a `config.json` under which that of its language model lies, as `language_key`, or the one that files
    had before, as that of Unlimited-OCR, where transformers takes it."""
    key = language_key(described)
    if key is None or config.get(key) or not config.get(_BEFORE):
        return key
    return _BEFORE if _takes(described, **{_BEFORE: {"vocab_size": _PROBE}}) else key


def _takes(described: "PreTrainedConfig", **entries: object) -> bool:
    """Whether transformers makes a language model of `_PROBE` tokens of these entries of a config of this class."""
    with contextlib.suppress(Exception):  # each class refuses numbers in its own way
        return bool(type(described)(**entries).get_text_config().vocab_size == _PROBE)
    return False


def experts_by_default(config: Mapping[str, object]) -> str | None:
    """Find an entry on experts that transformers fills in where `config.json` says nothing of them; `None` if there is
    none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return None
    described = _read(config).get_text_config()
    named = (*EXPERT_KEYS, *described.attribute_map)
    return experts_told({key: getattr(described, key, None) for key in named})


def language_key(described: "PreTrainedConfig") -> str | None:
    """The key of a config under which that of its language model lies; `None` if it is that itself."""
    text = described.get_text_config()
    return next((key for key in described.sub_configs if getattr(described, key, None) is text), None)


def language_entries(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a `config.json` that is about the language model: all of it, if nothing lies around that.

    Raises:
        InvalidInputError: transformers refuses an entry, or does not know the `model_type`.
    """
    inner = config.get(_language_key_in(config, _read(config)) or "")
    return inner if isinstance(inner, Mapping) else config


def with_language_entries(config: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a `config.json` with some entries of its language model replaced. Raises as `language_entries`."""
    key = _language_key_in(config, _read(config))
    if key is None or not config.get(key):
        return {**config, **changes}
    return {**config, key: {**language_entries(config), **changes}}


def _read(config: Mapping[str, object]) -> "PreTrainedConfig":
    check_model_type(config)
    with refused("read config.json"):
        return transformers_config(config)


def names_in_others(model_type: object) -> Mapping[str, str]:
    """Beginnings of the names that a language model's tensors have where it lies in another, and which they have where
    it lies alone; transformers writes the first ones, too, for one that it has loaded from such a model."""
    if not isinstance(model_type, str) or not model_type.endswith("_text"):
        return {}
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = {}
    for rule in get_checkpoint_conversion_mapping(model_type) or ():
        if inside := getattr(rule, "prefix_to_remove", None):
            start = f"{rule.model_prefix}." if rule.model_prefix else ""
            found[f"{start}{inside}."] = start
    return found


def language_model_in(model: "PreTrainedModel") -> "tuple[str, nn.Module]":
    """Path and module of the language model in a model, its head aside: an empty path and the model itself, if nothing
    lies around it."""
    from transformers import PreTrainedModel

    text = model.config.get_text_config()
    if text is model.config:
        return "", model
    found = (
        (path, module)
        for path, module in model.named_modules()
        if path and isinstance(module, PreTrainedModel) and type(module.config) is type(text)
    )
    return next(found, ("", model))


def towers_in(model: "PreTrainedModel") -> "list[tuple[str, nn.Module]]":
    """Paths and modules of the models beside the language model in a model, which text alone never reaches."""
    from transformers import PreTrainedModel

    path, language = language_model_in(model)
    inside = set(language.modules())
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and module not in inside and name and not path.startswith(f"{name}.")
    ]


def language_model_class(model_type: object) -> "type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]":
    """The class by which transformers builds and loads all of a language model: `AutoModelForImageTextToText`, if it
    has a class of this type there, or else `AutoModelForCausalLM`, which drops what lies around the text model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return (
        AutoModelForImageTextToText
        if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        else AutoModelForCausalLM
    )


@contextlib.contextmanager
def naming(model: "PreTrainedModel", config: Mapping[str, object], clause: str) -> Iterator[None]:
    """Context manager that puts the model's name and a clause in front of the message of any `InvalidInputError`."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{type(model).__name__} ({config.get('model_type')}) {clause}: {error}.") from None


def entries_returned(layer: "nn.Module") -> int:
    """Number of values that a decoder layer returns in a tuple, by its source; 0 if it returns hidden states alone."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(type(layer).forward))).body
    given = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    names = {value.id for value in given if isinstance(value, ast.Name)}
    for node in ast.walk(function):  # outputs = (hidden_states,)
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id in names for to in node.targets):
            given.append(node.value)
    starts = [value.left if isinstance(value, ast.BinOp) else value for value in given]  # (hidden_states,) + others
    return max(len(value.elts) if isinstance(value, ast.Tuple | ast.List) else 0 for value in starts)


def transformers_config(config: Mapping[str, object]) -> "PreTrainedConfig":
    """transformers' config of a model, defaults filled in, without its `quantization_config`. Raises what transformers
    raises where it does not know the `model_type`, or refuses an entry."""
    from transformers import AutoConfig, PreTrainedConfig

    raw: dict[str, object] = PreTrainedConfig._decode_special_floats(copy.deepcopy(dict(config)))
    raw.pop("quantization_config", None)
    return AutoConfig.for_model(**raw)
