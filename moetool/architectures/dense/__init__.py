"""Dense models: what is known of one by its `config.json`, derived from transformers' own class."""

from collections.abc import Mapping

from moetool.architectures.base import experts_told
from moetool.architectures.dense.base import FEATURES, DenseArchitecture
from moetool.architectures.dense.derived import derive_dense, has_experts
from moetool.architectures.dense.known import ENCODERS, KNOWN_DENSE, is_encoder
from moetool.architectures.known import KNOWN
from moetool.errors import InvalidInputError

__all__ = [
    "DENSE_SIBLINGS",
    "ENCODERS",
    "FEATURES",
    "KNOWN_DENSE",
    "DenseArchitecture",
    "check_predicts",
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
_ENCODES = ("MaskedLM", "Encoder", "SequenceClassification", "TokenClassification")  # ends of names of classes
_MASKED = ("MaskedLM", "PreTraining")
# Families that fill in words, and of which there are models that predict the next one, too.
_BOTH = ("flaubert", "reformer", "xlm")


def head_of_a_task(config: Mapping[str, object]) -> str | None:
    """The task that an encoder of a known family was saved for, by its `config.json`, if it is not finding hidden
    words."""
    listed = config.get("architectures")
    if not is_encoder(config) or not isinstance(listed, list | tuple) or not listed:
        return None
    # What ELECTRA is trained with beside its masked language model tells words that were replaced from others.
    heads = _MASKED[:1] if config.get("model_type") == "electra" else _MASKED
    return None if any(str(name).endswith(heads) for name in listed) else str(listed[0])


def check_predicts(config: Mapping[str, object]) -> None:
    """Raise `InvalidInputError` for an encoder of a family that is not known: as a causal language model, as which
    transformers loads many, each of its tokens sees those that it is to predict."""
    if _fills_in(config) and not config.get("is_decoder") and not is_encoder(config):
        raise InvalidInputError(
            f"This model ({config.get('model_type')}) only encodes: its tokens see those after them, and it predicts "
            f"none. Of encoders moetool takes {', '.join(ENCODERS)} only."
        )


def _fills_in(config: Mapping[str, object]) -> bool:
    listed = config.get("architectures")
    return isinstance(listed, list) and any(str(name).endswith("MaskedLM") for name in listed)


def _only_encodes(config: Mapping[str, object]) -> bool:
    """Whether a model that is no known encoder encodes, by the class it lists or those that transformers has of it."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    if is_encoder(config) or config.get("is_decoder"):
        return False
    listed = config.get("architectures")
    if isinstance(listed, list | tuple) and any(str(name).endswith(_ENCODES) for name in listed):
        return True
    others = {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *_BOTH}
    return config.get("model_type") in MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys() - others


def find_dense_architecture(config: Mapping[str, object], *, may_lie_within: bool = False) -> DenseArchitecture:
    """Describe the dense model behind a `config.json`, whatever custom modules that lists; with `may_lie_within` also
    one that is the language model of a model that sees or hears.

    Raises:
        InvalidInputError: the model is an MoE model already, encodes only, has an encoder and a decoder, has others
            around it, or transformers does not know it or runs it in a way that moetool does not handle.
    """
    model_type = config.get("model_type")
    if (told := experts_told(config)) and has_experts(config):
        raise InvalidInputError(_is_moe(config, told))
    if _only_encodes(config):
        raise InvalidInputError(
            f"This model ({model_type}) only encodes. Upcycling needs a decoder: a causal language model; moefy takes "
            f"{', '.join(ENCODERS)} too."
        )
    if config.get("is_encoder_decoder") is True:
        raise InvalidInputError(
            f"This model ({model_type}) has an encoder that reads one text and a decoder that writes another. "
            "Upcycling and moefying need a causal language model."
        )
    if not may_lie_within and isinstance(inner := config.get("text_config"), Mapping):
        raise InvalidInputError(
            f"This model ({model_type}) is a language model ({inner.get('model_type')}) with others around it. "
            "Save the language model as a checkpoint of its own first."
        )
    if "model_type" not in config:
        raise InvalidInputError("config.json names no model_type, so that its family cannot be told.")
    return derive_dense(config)


def _is_moe(config: Mapping[str, object], told: str) -> str:
    model_type = str(config.get("model_type"))
    of = "it" if model_type in DENSE_SIBLINGS else "what moetool upcycled to this family"
    way = f"; `export --format dense --expert 0` makes one of {of}" if model_type in {*KNOWN_DENSE, *KNOWN} else ""
    return (
        f"This model ({model_type}) is an MoE model already: {told}. Upcycling and moefying start from a dense "
        f"model{way}."
    )
