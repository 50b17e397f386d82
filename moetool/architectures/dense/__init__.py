"""Dense model families, one declarative file each. A file in this directory that defines `DENSE` is known."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from moetool.architectures import architectures
from moetool.architectures.base import experts_told
from moetool.architectures.dense.base import FEATURES, DenseArchitecture
from moetool.errors import InvalidInputError, did_you_mean

__all__ = [
    "DENSE_SIBLINGS",
    "FEATURES",
    "DenseArchitecture",
    "check_predicts",
    "dense_architectures",
    "find_dense_architecture",
    "head_of_a_task",
    "is_encoder",
]

# MoE families of the hub, and the dense model with the same layers: its type and class.
DENSE_SIBLINGS = {
    "mixtral": ("mistral", "MistralForCausalLM"),
    "qwen3_moe": ("qwen3", "Qwen3ForCausalLM"),
    "flex_olmo": ("olmo2", "Olmo2ForCausalLM"),
    "granitemoe": ("granite", "GraniteForCausalLM"),
}
_ENCODERS = ("MaskedLM", "Encoder", "SequenceClassification", "TokenClassification")
_MASKED = ("MaskedLM", "PreTraining")
_ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "deberta", "deberta-v2", "electra", "distilbert", "modernbert")


@cache
def dense_architectures() -> tuple[DenseArchitecture, ...]:
    """Every known family, by name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [module.DENSE for module in modules if hasattr(module, "DENSE")]
    return tuple(sorted(found, key=lambda family: family.name))


def is_encoder(config: Mapping[str, object]) -> bool:
    """Whether a `config.json` is that of a known family of encoders."""
    return any(family.is_encoder and config.get("model_type") in family.model_types for family in dense_architectures())


def head_of_a_task(config: Mapping[str, object]) -> str | None:
    """As what an encoder of a known family was saved, by its `config.json`, if that does not find hidden words."""
    listed = config.get("architectures")
    if not is_encoder(config) or not isinstance(listed, list | tuple) or not listed:
        return None
    return None if any(str(name).endswith(_MASKED) for name in listed) else str(listed[0])


def check_predicts(config: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for an encoder of a family that is not known: as a causal language model, as which
    transformers loads many, each of its tokens sees those that it is to predict."""
    listed = config.get("architectures")
    fills_in = isinstance(listed, list) and any(str(name).endswith("MaskedLM") for name in listed)
    encodes = (fills_in or config.get("model_type") in _ENCODER_TYPES) and not config.get("is_decoder")
    if encodes and not is_encoder(config):
        raise InvalidInputError(
            f"This model ({config.get('model_type')}) only encodes: its tokens see those after them, and it predicts "
            f"none. Of encoders moetool takes {_encoders()} only."
        )


def _encoders() -> str:
    return ", ".join(family.name for family in dense_architectures() if family.is_encoder)


def find_dense_architecture(config: Mapping[str, object]) -> DenseArchitecture:
    """The dense family that a `config.json` belongs to, by its model type, whatever custom modules it lists.

    Raises:
        InvalidInputError: the model is an MoE model already, encodes only, or its family is not known.
    """
    model_type = str(config.get("model_type"))
    by_type = {name: family for family in dense_architectures() for name in family.model_types}
    if told := experts_told(config):
        known = {*by_type, *(name for family in architectures() for name in family.model_types)}
        of = "it" if model_type in DENSE_SIBLINGS else "what moetool upcycled to this family"
        way = f"; `export --format dense --expert 0` makes one of {of}" if model_type in known else ""
        raise InvalidInputError(
            f"This model ({model_type}) is an MoE model already: {told}. Upcycling and moefying start from a dense "
            f"model{way}."
        )
    if model_type in by_type:
        return by_type[model_type]
    listed = config.get("architectures")
    classes = [str(name) for name in listed] if isinstance(listed, list | tuple) else []
    if model_type in _ENCODER_TYPES or any(mark in name for name in classes for mark in _ENCODERS):
        raise InvalidInputError(
            f"This model ({model_type}) only encodes. Upcycling needs a decoder: a causal language model; moefy takes "
            f"{_encoders()} too."
        )
    if isinstance(inner := config.get("text_config"), Mapping):
        raise InvalidInputError(
            f"This model ({model_type}) is a language model ({inner.get('model_type')}) with others around it. "
            "Save the language model as a checkpoint of its own first."
        )
    if "model_type" not in config:
        raise InvalidInputError("config.json names no model_type, so that its family cannot be told.")
    hint = did_you_mean(model_type, by_type)
    raise InvalidInputError(
        f"Unknown dense model family {model_type!r}. Known families: {', '.join(sorted(by_type))}.{hint}"
    )
