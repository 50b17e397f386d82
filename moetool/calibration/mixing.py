"""Several texts in one calibration set: how many windows each gives, in which order, and how that is said."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from moetool.calibration.bundled import kinds, texts
from moetool.calibration.data import BUNDLED, OWN_TEXT, DataSpec, data_files, parse_data
from moetool.checkpoint.source import local_path

ONE_KIND = (
    "All windows are of one kind of text: small models compressed on one kind alone lost 4 to 400 times as much on "
    "others; with half of the windows bundled (--mix 0.5) they lost 1 to 43 % of that there."
)


@dataclass(frozen=True)
class TextCounts:
    """Number of windows of each text in a calibration set.

    Attributes:
        given: of each source, by name.
        bundled: of each kind of the bundled text.
    """

    given: Mapping[str, int]
    bundled: Mapping[str, int] = field(default_factory=dict)

    @property
    def by_kind(self) -> dict[str, int]:
        """Windows of each source and of each kind of the bundled text, without those that give none."""
        return {kind: count for kind, count in {**self.given, **self.bundled}.items() if count}

    @property
    def is_of_one_kind(self) -> bool:
        """Whether all windows are of one source, unless that is the model, or of one kind of the bundled text."""
        return len(self.by_kind) == 1 and OWN_TEXT not in self.by_kind

    def __str__(self) -> str:
        """`64 windows: 32 of valid.txt, 32 of the bundled text in 8 kinds`."""
        parts = {name: count for name, count in self.given.items() if count}
        there = [kind for kind, count in self.bundled.items() if count]
        if there:
            which = f"in {len(there)} kinds" if len(there) > 1 else f"({there[0]})"
            parts[f"the bundled text {which}"] = sum(self.bundled.values())
        total = sum(parts.values())
        windows = f"{total:,} window{'s' if total != 1 else ''}"
        if len(parts) == 1:
            return f"{windows} of {next(iter(parts))}"
        return f"{windows}: {', '.join(f'{count:,} of {name}' for name, count in parts.items())}"


@dataclass(frozen=True)
class MixedSources:
    """The sources of a calibration set, and how many of its windows are due from each.

    Attributes:
        given: sources but for the bundled text, each with its name and the windows that are due.
        bundled: windows that are due of each kind of the bundled text.
        is_mixed: whether the bundled text stands beside what was given without being named there.
    """

    given: tuple[tuple[DataSpec, str, int], ...]
    bundled: Mapping[str, int]
    is_mixed: bool

    @classmethod
    def of(cls, specs: Sequence[DataSpec], windows: int, mix: float) -> "MixedSources":
        """Sources that were given, and beside them the share `mix` of the bundled text, unless they name it, or the
        model's own text, which is of many kinds, too. Raises `UsageError` for a kind of it that there is not."""
        is_mixed = mix > 0 and not any(spec.is_bundled or spec.is_self for spec in specs)
        beside = shared_out(windows, [1 - mix, mix])[1] if is_mixed else 0
        shares = shared_out(windows - beside, [spec.weight for spec in specs])
        due: dict[str, int] = {}
        asked = [(spec.config, count) for spec, count in zip(specs, shares, strict=True) if spec.is_bundled]
        for named, count in [*asked, *([(None, beside)] if is_mixed else [])]:
            of_kind = kinds(named)
            for kind, part in zip(of_kind, shared_out(count, [1.0] * len(of_kind)), strict=True):
                due[kind] = due.get(kind, 0) + part
        names = _names([spec for spec in specs if not spec.is_bundled], taken=due)
        own = [(spec, count) for spec, count in zip(specs, shares, strict=True) if not spec.is_bundled]
        return cls(tuple((spec, name, n) for (spec, n), name in zip(own, names, strict=True)), due, is_mixed)

    @property
    def counts(self) -> TextCounts:
        """Number of windows that are due of each text, which a plan shows before any is read."""
        return TextCounts({name: due for _, name, due in self.given}, self.bundled)


def _names(specs: Sequence[DataSpec], taken: Collection[str]) -> list[str]:
    """What to call sources: by the names of their files, with numbers where one has another's or a kind's."""
    found: list[str] = []
    for spec in specs:
        name, number = spec.name, 1
        while name in found or name in taken:
            number += 1
            name = f"{spec.name} ({number})"
        found.append(name)
    return found


def shared_out(windows: int, weights: Sequence[float]) -> list[int]:
    """`windows` divided in proportion to `weights`, by largest remainder; the first of equals wins."""
    quotas = [windows * weight / (math.fsum(weights) or 1.0) for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda i: shares[i] - quotas[i])
    for i in order[: windows - sum(shares)]:
        shares[i] += 1
    return shares


def taking_turns(counts: Sequence[int]) -> list[int]:
    """An order of so many windows of several texts, one text after the other, in which any beginning has them all in
    proportion: positions in the texts' windows put together."""
    starts = [0, *accumulate(counts)]
    places = [
        ((place + 0.5) / count, which, starts[which] + place)
        for which, count in enumerate(counts)
        for place in range(count)
    ]
    return [position for *_, position in sorted(places)]


def text_bytes(spec: DataSpec) -> int | None:
    """Bytes of a source as it lies on this machine, or of the bundled text; `None` of the hub and of what the model
    writes."""
    if spec.is_bundled:
        return sum(len(text.encode()) for kind in kinds(spec.config) for text in texts(kind))
    if spec.is_self or not (path := local_path(spec.source)).exists():
        return None
    return sum(file.stat().st_size for file in data_files(path))


def most_windows(data: str, length: int, mix: float) -> int | None:
    """The most windows of `length` tokens that a calibration set can have, by the bytes of its texts: a token takes one
    at least. `None` where these are not known: as `text_bytes`, and of packed files (parquet)."""
    specs, found = parse_data(data), 0
    is_mixed = MixedSources.of(specs, 1, mix).is_mixed
    for spec in [*specs, *([DataSpec(BUNDLED)] if is_mixed else [])]:
        if (nbytes := text_bytes(spec)) is None:
            return None
        if not spec.is_bundled and any(file.suffix == ".parquet" for file in data_files(local_path(spec.source))):
            return None
        found += nbytes // length
    return found
