"""What a shell offers for options whose values have names: methods, presets, families.

`moetool --install-completion` sets it up. Names are looked up when the user presses tab, and not before.
"""

from collections.abc import Callable, Iterable

from moetool.cli.presets import presets_for

Offer = Callable[[str], list[str]]


def offered(names: Callable[[], Iterable[str]]) -> Offer:
    """The names that go on with what was typed; where several stand with commas, with what is behind the last."""

    def offer(incomplete: str) -> list[str]:
        before, comma, own = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(own)]

    return offer


def offered_presets(command: str, method: str | None) -> Offer:
    """The presets of a command, or of its method if one was typed."""
    return offered(lambda: presets_for(command, method))


def offered_for(option: str) -> Offer | None:
    """What is offered for an option of that name, whatever the command; `None` for one that has no names."""
    names = {"target": _targets, "methods": _methods}.get(option)
    return None if names is None else offered(names)


def _targets() -> Iterable[str]:
    from moetool.upcycle.targets import targets

    return ("auto", *targets())


def _methods() -> Iterable[str]:
    from moetool.stages import stages

    return (name for name, stage in stages().items() if stage.method_of == "compress")
