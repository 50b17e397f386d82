"""The name that transformers gives the cache of keys and values: `cache` since 5.24, `past_key_values` before.

The old name is still taken there, with a warning; but layers are called by the new one, and outputs have it.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

_INSTALLED = tuple(map(int, version("transformers").split(".")[:2]))
CACHE = "cache" if _INSTALLED >= (5, 24) else "past_key_values"


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache that a module of transformers is called with, by its name or that before; `None` if there is none.
    What versions before 5.24 call `cache` is the paged one of continuous batching."""
    return arguments.get(CACHE, arguments.get("past_key_values"))


def cache_of(output: object) -> Any:
    """The cache that an output of transformers holds; `None` if there is none."""
    return getattr(output, CACHE, None)
