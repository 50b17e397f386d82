"""Shell completion of option values that have names: methods, presets, families.

`moetool --install-completion` sets it up. Names are looked up when the user presses tab, and not before.
"""

from collections.abc import Callable, Iterable

Offer = Callable[[str], list[str]]


def offered(names: Callable[[], Iterable[str]]) -> Offer:
    """The names that go on with what was typed; where several stand with commas, with what is behind the last."""

    def offer(incomplete: str) -> list[str]:
        before, comma, own = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(own)]

    return offer


def offered_presets(command: str, method: str | None) -> Offer:
    """The presets of a command, or of its method if one was typed."""

    def names() -> Iterable[str]:
        from moetool.cli.presets import presets_for

        return presets_for(command, method)

    return offered(names)
