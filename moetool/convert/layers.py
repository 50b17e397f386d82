"""Parsing of `--layers`, the layers of a dense model that become MoE layers."""

from moetool.errors import UsageError


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Layers from `all`, `every:2` (1, 3, 5 …) or `0,4,8`, ascending.

    Raises:
        UsageError: it is none of these, or names a layer that a model of `count` layers does not have.
    """
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
