"""Model families, one declarative file each. A file in this directory that defines `ARCHITECTURE` is known,
one that defines `UNSUPPORTED` is refused with its reason.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from moetool.architectures.base import EXPERT_KEYS, ROLES, Architecture, MoEShape, Role, Unsupported, experts_told
from moetool.architectures.derived import derive
from moetool.architectures.described import check_language_is_there, names_in_others
from moetool.errors import InvalidInputError

__all__ = [
    "ROLES",
    "Architecture",
    "MoEShape",
    "Role",
    "aliases",
    "architectures",
    "find_architecture",
    "unsupported",
]


def _defined(name: str) -> list[Any]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [getattr(module, name) for module in modules if hasattr(module, name)]
    return sorted(found, key=lambda family: family.name)


@cache
def architectures() -> tuple[Architecture, ...]:
    """Every known family, by name."""
    return tuple(_defined("ARCHITECTURE"))


@cache
def unsupported() -> tuple[Unsupported, ...]:
    """Every family that is known not to fit, by name."""
    return tuple(_defined("UNSUPPORTED"))


def aliases(config: Mapping[str, object]) -> Mapping[str, str]:
    """Parts of names that some tools write for the family of a `config.json`, and what stands there on the hub."""
    named = (family for family in architectures() if config.get("model_type") in family.model_types)
    return next((family.aliases for family in named), names_in_others(config.get("model_type")))


def find_architecture(config: Mapping[str, object]) -> Architecture:
    """The family of the hub that a `config.json` belongs to, by its model type.

    Raises:
        InvalidInputError: the model is dense, or its family is not known or known not to fit.
    """
    model_type = config.get("model_type")
    by_type = {name: architecture for architecture in architectures() for name in architecture.model_types}
    if isinstance(model_type, str) and model_type in by_type:
        return by_type[model_type]
    for family in unsupported():
        if model_type in family.model_types:
            raise InvalidInputError(f"{family.name} cannot be compressed: {family.reason}.")
    known = ", ".join(sorted(by_type))
    told = experts_told(config)
    if told is None:
        check_language_is_there(config)
        raise InvalidInputError(
            f"model_type {model_type!r} is not an MoE model: its config.json names no experts "
            f"({', '.join(EXPERT_KEYS)}). `moetool upcycle` makes one of a dense model. Known MoE families: {known}."
        )
    return derive(config)
