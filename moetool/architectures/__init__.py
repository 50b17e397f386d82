"""Model families, one declarative file each. A file in this directory that defines `ARCHITECTURE` is known."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from moetool.architectures.base import ROLES, Architecture, MoEShape, Role
from moetool.errors import InvalidInputError

__all__ = ["ROLES", "Architecture", "MoEShape", "Role", "architectures", "find_architecture"]

# Keys that only a mixture of experts has in its config, whatever the family.
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@cache
def architectures() -> tuple[Architecture, ...]:
    """Every known family, by name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]
    return tuple(sorted(found, key=lambda architecture: architecture.name))


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """The family that a `config.json` belongs to.

    Raises:
        InvalidInputError: the model is dense, or its family is not known.
    """
    model_type = config.get("model_type")
    by_type = {name: architecture for architecture in architectures() for name in architecture.model_types}
    if isinstance(model_type, str) and model_type in by_type:
        return by_type[model_type]
    known = ", ".join(sorted(by_type))
    if not any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERT_KEYS):
        raise InvalidInputError(
            f"model_type {model_type!r} is not a mixture of experts: its config.json names no experts "
            f"({', '.join(_EXPERT_KEYS)}). Known MoE families: {known}."
        )
    close = difflib.get_close_matches(str(model_type), by_type, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    raise InvalidInputError(f"Unknown model family {model_type!r}. Known MoE families: {known}.{hint}")
