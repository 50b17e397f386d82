"""Metadata of a GGUF file about its model, and which of them were looked at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.format.gguf.family import GgufFamily


@dataclass(frozen=True)
class GgufMetadata:
    """What a GGUF file says of its model.

    Attributes:
        file: where it lies.
        family: of the model.
        entries: metadata of the architecture, without its name, by key.
        shapes: shape of every tensor, as torch has it, by GGUF's name.
        read: gives a tensor in fp32 by GGUF's name.
        asked: keys that were looked at.
    """

    file: Path
    family: GgufFamily
    entries: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    asked: set[str] = field(default_factory=set, repr=False, init=False)

    def entry(self, key: str) -> Any:
        """An entry of the metadata; `None` if there is none."""
        self.asked.add(key)
        return self.entries.get(key)

    def number(self, key: str) -> Any:
        """An entry that there has to be, one for all layers."""
        if (value := self.entry(key)) is None:
            raise InvalidInputError(f"{self.file} lacks {self.family.architecture}.{key} in its metadata.")
        if isinstance(value, list):
            if len({*value}) != 1:
                raise self.unread(f"layers that differ in {key}")
            return value[0]
        return value

    def unread(self, what: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.file} has {what}, which moetool does not read from GGUF. Take the model's own checkpoint."
        )


def decimal(value: float) -> float:
    """A fraction that was kept in fp32 as people write it: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
