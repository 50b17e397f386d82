"""The models that `moetool compare` makes, by `--methods`, `--ratios` and `--option`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from moetool.compare.options import CompareOptions, chosen
from moetool.errors import UsageError, did_you_mean
from moetool.job.options import RunOptions
from moetool.job.stage import AnyStage
from moetool.stages import stages

COMMAND = "compress"
_SHARED = frozenset(
    {"calibration", "samples", "mix", "seed", "sequence_length", "bos", "device", "compute_dtype", "memory"}
)
# A type of options and what was said → the options, or a `UsageError` that names what does not fit.
Checked: TypeAlias = Callable[[type[RunOptions], Mapping[str, object]], RunOptions]


@dataclass(frozen=True)
class Candidate:
    """A model to be made: its name in the table, how, and the ratio it is asked for, if its method has one."""

    name: str
    kind: type[AnyStage]
    options: RunOptions
    asked: float | None

    @property
    def label(self) -> str:
        """Name of the candidate in tables: its method, and the ratio if one was asked for."""
        return self.name if self.asked is None else f"{self.name} at {self.asked:.1%}"


def candidates(options: CompareOptions, checked: Checked) -> list[Candidate]:
    """Every method at every ratio, a method's one after the other.

    Raises:
        UsageError: no such method or option, a value that does not fit, or nothing to compare.
    """
    kinds = {name: kind for name, kind in stages().items() if kind.method_of == COMMAND}
    named = _named(options, kinds)
    own = _own(options, named)
    found = []
    for name, kind in named.items():
        fields = kind.options_type.model_fields
        given = chosen(options, _SHARED & fields.keys()) | own[name]
        replaced = {"ratio", *kind.options_type.alternatives} & own[name].keys()
        ratios = options.ratios if "ratio" in fields and not replaced else ()
        if "ratio" in kind.options_type.alternatives and not replaced and not ratios:
            others = [f"--option {name}:{own}=…" for own in kind.options_type.alternatives if own != "ratio"]
            raise UsageError(f"{name} needs a size: give {' or '.join(['--ratios 0.4,0.6', *others])}.")
        for ratio in ratios or (None,):
            asked = {} if ratio is None else {"ratio": ratio}
            try:
                own_options = checked(kind.options_type, {**given, **asked})
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from error
            found.append(Candidate(name, kind, own_options, ratio))
    if twice := [model for model in options.models if options.models.count(model) > 1]:
        raise UsageError(f"--models names {twice[0]} twice: leave one out.")
    if not found and not options.models:
        raise UsageError("Nothing to compare: give --methods, or --models that are there.")
    return found


def _named(options: CompareOptions, kinds: Mapping[str, type[AnyStage]]) -> dict[str, type[AnyStage]]:
    found: dict[str, type[AnyStage]] = {}
    for entry in options.methods:
        name, _, method = entry.partition("=")
        method = method or name
        if method not in kinds:
            raise UsageError(f"--methods {entry}: there is {', '.join(kinds)}.{did_you_mean(method, kinds)}")
        if name in found or not name or "/" in name:
            raise UsageError(f"--methods {entry}: every row needs a name of its own, as in other={method}.")
        found[name] = kinds[method]
    return found


def _own(options: CompareOptions, named: Mapping[str, object]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {name: {} for name in named}
    for said in options.option:
        place, _, value = said.partition("=")
        name, colon, option = place.partition(":")
        if not colon or not option or "=" not in said:
            raise UsageError(f"--option {said}: write NAME:OPTION=VALUE, such as hybrid:base_bits=3.")
        if name not in named:
            raise UsageError(f"--option {said}: --methods has {', '.join(named) or 'none'}.{did_you_mean(name, named)}")
        try:
            read = yaml.safe_load(value)  # as a preset would have it
        except yaml.YAMLError as error:
            raise UsageError(f"--option {said}: the value is not valid YAML.") from error
        if found[name].setdefault(option.replace("-", "_"), read) != read:
            raise UsageError(f"--option {said}: {name} has this option already, with another value. Give it once.")
    return found
