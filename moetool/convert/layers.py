"""Parsing of `--layers`, the layers of a dense model that become MoE layers."""

from collections.abc import Sequence

from moetool.errors import UsageError


def parse_layers(text: str, count: int, having: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers from `all`, `every:2` (1, 3, 5 …) or `0,4,8`, ascending.

    Args:
        text: as a user wrote it.
        count: number of layers of the model.
        having: those that have a feed-forward network, all of them by default.

    Raises:
        UsageError: it is none of these, or names a layer that the model does not have, or that has no network.
    """
    listed, able = _parsed(text, count), range(count) if having is None else having
    found = tuple(layer for layer in listed if layer in able)
    if not found or (text[0].isdigit() and found != listed):
        names = ", ".join(map(str, able))
        raise UsageError(f"--layers {text}: of this model's layers {names} have a feed-forward network.")
    return found


def _parsed(text: str, count: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(count))
    kind, _, number = text.partition(":")
    if kind == "every" and _is_number(number) and int(number):
        if found := tuple(range(int(number) - 1, count, int(number))):
            return found
        raise UsageError(f"--layers {text}: the model has only {count} layers.")
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_number, parts)):
        raise UsageError(f"--layers {text}: give all, every:N or a list such as 0,4,8.")
    layers = tuple(sorted({int(part) for part in parts}))
    if layers[-1] >= count:
        raise UsageError(f"--layers {text}: the model has layers 0 to {count - 1}.")
    return layers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
