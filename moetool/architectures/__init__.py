"""MoE models, each derived from transformers' own class by its `config.json`."""

from collections.abc import Mapping

from moetool.architectures.base import EXPERT_KEYS, Architecture, experts_told, whole_number
from moetool.architectures.derived import derive
from moetool.architectures.described import check_language_is_there, experts_by_default, names_in_others
from moetool.architectures.known import BEGINNINGS, KNOWN, check_refused
from moetool.architectures.shape import ROLES, MoEShape, Role
from moetool.errors import InvalidInputError

__all__ = [
    "ROLES",
    "Architecture",
    "MoEShape",
    "Role",
    "aliases",
    "beginnings",
    "find_architecture",
    "names_no_experts",
]


def aliases(config: Mapping[str, object]) -> Mapping[str, str]:
    """Parts of names that some tools write for the family of a `config.json`, and what stands there on the hub. A
    checkpoint with such names is read as if it had the hub's."""
    family = KNOWN.get(str(config.get("model_type")))
    return names_in_others(config.get("model_type")) if family is None else family.aliases


def beginnings(config: Mapping[str, object]) -> Mapping[str, str]:
    """Beginnings of tensors' names on the hub, and what transformers writes in their places when it saves a model of
    this `config.json` (DeepSeek-V4)."""
    return BEGINNINGS.get(str(config.get("model_type")), {})


def names_no_experts(config: Mapping[str, object]) -> bool:
    """Whether a `config.json` is that of a dense model: it names no experts, and its family has none by default."""
    has_one = str(config.get("model_type")) in KNOWN and whole_number(config, *EXPERT_KEYS) == 1
    return not has_one and (experts_told(config) or experts_by_default(config)) is None


def find_architecture(config: Mapping[str, object]) -> Architecture:
    """The experts of the model that a `config.json` describes.

    Raises:
        InvalidInputError: the model is dense, transformers does not know its family, or its experts, its router or
            their names on disk are of a kind that moetool does not handle.
    """
    check_refused(config)
    if names_no_experts(config):
        check_language_is_there(config)
        raise InvalidInputError(
            f"model_type {config.get('model_type')!r} is not an MoE model: its config.json names no experts "
            f"({', '.join(EXPERT_KEYS)}). `moetool upcycle` makes one of a dense model; `moetool list architectures` "
            "lists families that have experts."
        )
    return derive(config)
