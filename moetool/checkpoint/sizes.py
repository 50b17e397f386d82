"""Bytes as people write them: `8GiB`, `5GB`, `1500000`."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("iB", 1024))
}


def parse_bytes(value: object) -> object:
    """`"8GiB"` → 8589934592; anything but a string passes through."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"'{value}' is not a size; write it like 8GiB or 500MB")
    return int(float(match[1]) * units[match[2].lower()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]


def format_bytes(count: float) -> str:
    """1536 → `1.5 kB` in decimal units, as files are measured."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def format_change(ratio: float) -> str:
    """0.4 → `40.00% smaller`, −0.1 → `10.00% larger`."""
    return f"{abs(ratio):.2%} {'smaller' if ratio >= 0 else 'larger'}"
