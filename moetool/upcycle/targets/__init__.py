"""Families that upcycled models are written as, one file each, and how one is chosen."""

import importlib
import pkgutil
from functools import cache

from moetool.architectures.dense import FEATURES
from moetool.errors import InvalidInputError, UsageError, did_you_mean
from moetool.upcycle.targets.base import Target

__all__ = ["Target", "choose_target", "targets"]

# What most engines know comes first, our own module last.
_PREFERENCE = ("mixtral", "granitemoe", "granitemoeshared", "qwen2_moe", "qwen3_moe", "flex_olmo", "moetool")


@cache
def targets() -> dict[str, Target]:
    """Find every target family by name, in the order of preference in which `--target auto` tries them."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = {module.TARGET.name: module.TARGET for module in modules if hasattr(module, "TARGET")}
    rank = {name: position for position, name in enumerate(_PREFERENCE)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[0], len(rank) - 2), item[0])))


def choose_target(name: str, features: tuple[str, ...]) -> Target:
    """The target that `--target` names, or for `auto` the first that can express these features.

    Raises:
        UsageError: there is no target of that name.
        InvalidInputError: the one that was asked for cannot express something, which is named.
    """
    known = targets()
    if name == "auto":
        able = [target for target in known.values() if not target.missing(features)]
        return next((target for target in able if not target.last_resort_for & set(features)), able[0])
    if name not in known:
        raise UsageError(f"--target {name}: there is auto, {', '.join(known)}.{did_you_mean(name, known)}")
    target = known[name]
    if missing := target.missing(features):
        lacking = [FEATURES[feature] for feature in missing if feature not in target.needs]
        needed = [FEATURES[feature] for feature in missing if feature in target.needs]
        reasons = ([f"it cannot express {', '.join(lacking)}"] if lacking else []) + (
            [f"it always has {' and '.join(needed)}"] if needed else []
        )
        possible = [other.name for other in known.values() if not other.missing(features)]
        raise InvalidInputError(
            f"This model cannot be expressed as {name}: {'; '.join(reasons)}. Possible here: {', '.join(possible)}."
        )
    return target
