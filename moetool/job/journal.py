"""The journal of a job: what is done, which files came of it, and what these held."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import xxhash

from moetool.checkpoint.files import atomically, storage_errors


class _Line(TypedDict, total=False):
    """What a line holds besides its digest: units to make `again`, or all else of one that is done. The first line of
    each process that has gone on says what the `inputs` were."""

    number: int
    run: str
    inputs: Mapping[str, object]
    again: list[str]
    unit: str
    made: dict[str, str]
    spent: list[str]
    told: dict[str, object]
    conditions: dict[str, object]


@dataclass
class Unit:
    """One finished piece of work.

    Attributes:
        order: when it was finished for the first time, among all units.
        files: digests by name of the files that it made and that nothing has used up yet.
        has_spent_files: whether something that it made was needed by later units only, and is gone.
        told: what it notes for later, in words of JSON.
    """

    order: int
    files: dict[str, str] = field(default_factory=dict)
    has_spent_files: bool = False
    told: dict[str, object] = field(default_factory=dict)


class Journal:
    """A file with a line for each finished unit, each with a digest of its own.

    Attributes:
        units: what was noted, by name.
        again: those of them that are to be made again.
        run: the fingerprint that its lines carry; `None` if there is none.
        noted: the inputs, as the last line that tells them has them; `None` if none does, as with an earlier moetool.
        gaps: orders of units whose lines are damaged or lost.
        conditions: under which the run was begun, which every line of a unit says: those of the file, if it has any.
    """

    def __init__(self, path: Path, fingerprint: str, inputs: Mapping[str, object] = {}) -> None:
        """Read what is there, if anything is; the next line will say what `inputs` are now, unless that is known."""
        self.path, self._fingerprint, self._inputs = path, fingerprint, inputs
        self.noted: Mapping[str, object] | None = None
        self.units: dict[str, Unit] = {}
        self.again: set[str] = set()
        self.run: str | None = None
        self.gaps: list[int] = []
        self.conditions: Mapping[str, object] = {}
        self._next = 0
        content = path.read_bytes() if path.exists() else b""
        self._is_torn = bool(content) and not content.endswith(b"\n")
        self._read(content.splitlines())

    def _read(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if (entry := _checked(line)) is None:
                continue  # the number that it had is missing now, unless a process died while it was writing it
            if entry["number"] != self._next:
                self.gaps.append(len(self.units))
            self._next = entry["number"] + 1
            self.run = entry["run"]
            self.noted = entry.get("inputs", self.noted)
            self._apply(entry)

    def _apply(self, entry: _Line) -> None:
        if "again" in entry:
            self.gaps.clear()
            for name in self.units.keys() & set(entry["again"]):
                self.again.add(name)
                self.units[name].files = {}
            return
        self.conditions = entry.get("conditions", self.conditions)
        name = entry["unit"]
        unit = self.units.setdefault(name, Unit(len(self.units)))
        self.again.discard(name)
        unit.told = entry["told"]
        unit.has_spent_files = False
        for other in self.units.values():
            for made in entry["made"]:
                other.files.pop(made, None)
            for spent in entry["spent"]:
                if other.files.pop(spent, None) is not None:
                    other.has_spent_files = True
        unit.files = {**unit.files, **entry["made"]}

    def is_done(self, unit: str) -> bool:
        """Whether a unit is listed as done and none of its files has to be made again."""
        return unit in self.units and unit not in self.again

    def done(
        self, unit: str, made: Mapping[str, str] = {}, spent: Iterable[str] = (), told: Mapping[str, object] = {}
    ) -> None:
        """Note that a unit is done: the files that it `made` with their digests, those that it `spent`, which are not
        needed any more, and what it has to tell. Raises `ResourceError` if it cannot be written."""
        line: _Line = {"unit": unit, "made": dict(made), "spent": list(spent), "told": dict(told)}
        self._append({**line, "conditions": dict(self.conditions)} if self.conditions else line)

    def undo(self, units: Iterable[str]) -> None:
        """Note that units are to be made again, and that gaps have been seen to."""
        self._append({"again": sorted(units)})

    def _append(self, entry: _Line) -> None:
        entry = {**entry, "number": self._next, "run": self._fingerprint}
        if self.noted != self._inputs:
            entry["inputs"] = self.noted = self._inputs
        line = _line(entry)
        with storage_errors(self.path), self.path.open("a", encoding="ascii") as file:
            file.write("\n" + line if self._is_torn else line)
            file.flush()
            os.fsync(file.fileno())
        self._is_torn = False
        self._next += 1
        self.run = self._fingerprint
        self._apply(entry)


def hand_on(path: Path, target: Path, run: str, inputs: Mapping[str, object]) -> None:
    """Write all lines of a journal to another, whole or not at all, as those of the `run` with that fingerprint, which
    reads these `inputs`."""
    entries = [entry for line in path.read_bytes().splitlines() if (entry := _checked(line)) is not None]
    if entries:
        entries[0] = {**entries[0], "inputs": inputs}
    with atomically(target) as temporary, storage_errors(target):
        temporary.write_text("".join(_line({**entry, "run": run}) for entry in entries), encoding="ascii")


def _line(entry: _Line) -> str:
    return json.dumps({**entry, "check": _check(entry)}) + "\n"


def _check(entry: Mapping[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(entry, sort_keys=True).encode())


def _checked(line: bytes) -> _Line | None:
    """A line's content; `None` if it is not what was written."""
    try:
        entry = json.loads(line)
        return entry if entry.pop("check") == _check(entry) else None
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
