"""Sizes as people write them: bytes (`8GiB`, `1500000`) and shares of bytes (`0.4`, `40%`)."""

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("iB", 1024))
}


def parse_bytes(value: object) -> object:
    """`"8GiB"` → 8589934592; anything but a string passes through.

    Raises:
        ValueError: it is no size, or below 1000 without a unit, by which nobody means bytes.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"'{value}' is not a size; write it like 8GiB or 500MB")
    if not match[2] and 0 < Decimal(match[1]) < 1000:
        raise ValueError(f"'{value}' has no unit; write {match[1]}GB, {match[1]}MB or {match[1]}B")
    return int(Decimal(match[1]) * units[match[2].lower()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]


def parse_share(value: object) -> object:
    """`"40%"` and `"0.4"` → 0.4, a share of all bytes; anything but a number or a string passes through.

    Raises:
        ValueError: it is no number, or not above 0 and below 1.
    """
    return _parsed_share(value, "all bytes", zero=False)


def parse_window_share(value: object) -> object:
    """`"25%"` and `"0.25"` → 0.25, a share of windows, which may be 0; anything but numbers and strings passes through.

    Raises:
        ValueError: it is no number, or below 0, or not below 1.
    """
    return _parsed_share(value, "the windows", zero=True)


def parse_part(value: object) -> object:
    """`"75%"` and `"0.75"` → 0.75, a part of anything, whose bounds the field has; anything but numbers and strings
    passes through.

    Raises:
        ValueError: it is no number, or one that only means something with a percent sign.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return value
    share, has_sign = _read_share(value)
    if 2 <= share <= 100 and not has_sign:
        raise ValueError(f"for {share:g} % write {share / 100:g} or {share:g}%")
    return share


def _parsed_share(value: object, whole: str, *, zero: bool) -> object:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return value
    share, _ = _read_share(value)
    if not 0 <= share < 1 or (share == 0 and not zero):
        instead = f"; for {share:g} % write {share / 100:g} or {share:g}%" if 2 <= share < 100 else ""
        raise ValueError(f"it is a share of {whole}, {'at least' if zero else 'above'} 0 and below 1{instead}")
    return share


def _read_share(value: str | float) -> tuple[float, bool]:
    """The number, and whether it has a percent sign."""
    match = re.fullmatch(r"\s*(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(%?)\s*", str(value))
    if match is None:
        raise ValueError("write a share like 0.4 or 40%")
    return float(match[1]) / (100 if match[2] else 1), bool(match[2])


Ratio = Annotated[float, BeforeValidator(parse_share)]
WindowShare = Annotated[float, BeforeValidator(parse_window_share)]
Part = Annotated[float, BeforeValidator(parse_part)]


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units, as disks are measured: 1536 is `1.5 kB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def format_least_bytes(count: int) -> str:
    """Format a number of bytes rounded up, so that whoever types what is shown gives enough: 123840 is `123.9 kB`."""
    unit = 1
    while count >= 1000 * unit and unit < 10**12:
        unit *= 1000
    step = max(1, unit // 10)
    return format_bytes(-(-count // step) * step)


def format_most_share(share: float) -> str:
    """Format a share rounded down to three digits, so that whoever types what is shown asks for no more: 0.59379 is
    `0.593`."""
    return f"{math.floor(1000 * share) / 1000:g}"


def as_read_from(gguf: int | None) -> str:
    """What is said behind the size of a checkpoint that was read from a GGUF file of so many bytes; else nothing."""
    return "" if gguf is None else f" as read from a GGUF file of {format_bytes(gguf)}"


def format_change(ratio: float) -> str:
    """Format a ratio of saved bytes in words: 0.4 is `40.00% smaller`, −0.1 is `10.00% larger`."""
    return f"{abs(ratio):.2%} {'smaller' if ratio >= 0 else 'larger'}"
