"""Make every model, measure it, note the row, delete it: one after the other, and again where it was left."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moetool.calibration.bundled import PACKED
from moetool.calibration.comparable import check_comparable
from moetool.calibration.data import BUNDLED, data_files, parse_data
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.files import fast_digest
from moetool.checkpoint.identity import file_states, hub_sha256
from moetool.checkpoint.reader import Checkpoint
from moetool.compare.candidates import Candidate
from moetool.compare.options import CompareOptions, chosen
from moetool.compare.results import Compared, ComparedModel, SharedStatistics
from moetool.errors import InterruptedRunError, MoetoolError, UsageError
from moetool.job.checks import output_directory
from moetool.job.execute import measure_stages, run_stage
from moetool.job.journal import Journal
from moetool.job.lock import Lock
from moetool.job.plan import fingerprint
from moetool.job.processes import processes
from moetool.job.progress import Progress
from moetool.job.result import Printed
from moetool.job.stage import AnyStage, found_here
from moetool.measure.perplexity import EvaluationOptions, perplexity

_JOURNAL, _LOCK = "journal.jsonl", ".moetool-compare"
_EVALUATION = frozenset(EvaluationOptions.model_fields)
_INCIDENTAL = {"device"}  # of an evaluation
_PASS_PREFIX = "statistics-"  # of where passes are done, of this comparison or of one before it with other rows
# What the journal has noted, read back.
_ROW, _COMPARED = TypeAdapter(ComparedModel), TypeAdapter(Compared)


def compare(
    model: str,
    options: CompareOptions,
    wanted: Sequence[Candidate],
    work: Path,
    *,
    keep: bool,
    progress: Progress,
    seen: Callable[[ComparedModel], None],
) -> Compared:
    """Measure the original, the models that are there, and every candidate.

    What is done is noted in `work` under fingerprints of all that decides it, and not done again; a model that was
    half made is gone on with. What several candidates measure before they spend their budgets is measured once, and
    each begins with that.

    Args:
        model: the original.
        options: of the measurement.
        wanted: what to make of it.
        work: where models are made, and rows noted; new, empty, or an earlier comparison's.
        keep: leave the models there.
        progress: told where it is.
        seen: called with every row as soon as there is one.

    Raises:
        InterruptedRunError, KeyboardInterrupt: it was stopped; the same call goes on.
        MoetoolError: the original or the text cannot be used. What goes wrong with a candidate is said in its row.
    """
    if processes() > 1:
        raise UsageError(f"compare runs in one process; this is one of {processes()}. Start it without a launcher.")
    work = output_directory(work)
    if work.exists() and any(work.iterdir()) and not (work / _LOCK).exists():
        raise UsageError(f"{work} is not empty and holds no comparison. Choose another place (--work).")
    with Lock(work / _LOCK, work):
        try:
            return _Comparing(model, options, work, keep, progress).all(wanted, seen)
        except (InterruptedRunError, KeyboardInterrupt) as error:
            said = f"Stopped. What is done is noted in {work}: the same command goes on."
            raise type(error)(said) from error


@dataclass(frozen=True)
class _Wanted:
    """A model that is to be made.

    Attributes:
        candidate: how.
        stage: that makes it.
        made: a fingerprint of all that decides what comes of it.
        shared: the same of what is measured before its budget is spent; `None` if nothing is that can be shared.
    """

    candidate: Candidate
    stage: AnyStage
    made: str
    shared: str | None


@dataclass(frozen=True)
class _StatisticsPass:
    """One calibration pass whose statistics several candidates share.

    Attributes:
        directory: where it is done.
        identity: a fingerprint of it.
        wanted: for what, two or more.
    """

    directory: Path
    identity: str
    wanted: list[_Wanted] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """Labels of the rows that share the pass."""
        return [each.candidate.label for each in self.wanted]

    def run(self, progress: Progress) -> float | None:
        """Do it, or what is missing of it; the seconds, if it was all of it."""
        if not self.directory.exists():
            progress.log(f"One statistics pass shared by {', '.join(self.rows)}.")
        return measure_stages([each.stage for each in self.wanted], self.directory, self.identity, progress)


class _Comparing:
    """A run of `moetool compare`: one original, the texts, and all candidates."""

    def __init__(self, model: str, options: CompareOptions, work: Path, keep: bool, progress: Progress) -> None:
        self._model, self._work, self._keep, self._progress = model, work, keep, progress
        self._journal = Journal(work / _JOURNAL, "compare")
        self._evaluation = EvaluationOptions.model_validate(chosen(options, _EVALUATION))
        self._original = Checkpoint.open(model)
        self._bytes = self._original.weight_bytes
        self._asked = {
            "evaluation": self._evaluation.model_dump(mode="json", exclude=_INCIDENTAL),
            "text": text_digests(self._evaluation.data),
            "told": "text by text",  # rows of older comparisons are not
        }
        self._calibration = text_digests(options.calibration or BUNDLED) | {str(PACKED): fast_digest(PACKED)}
        self._models = options.models

    def all(self, wanted: Iterable[Candidate], seen: Callable[[ComparedModel], None]) -> Compared:
        """The table; every row is `seen` when it is there.

        Raises:
            UsageError: headers and options say of every row that it cannot be.
        """
        there = [self._opened(path) for path in self._models]
        stages = [self._wanted(each) for each in wanted]
        self._check_any([*there, *stages])
        found = self._noted(self._key("original", {}), lambda: self._evaluated(self._model, self._evaluation))
        self._passes = _passes([each for each in stages if isinstance(each, _Wanted)], self._work)
        rows = []
        for make in [*(lambda path=path, one=one: self._there(path, one)
                       for path, one in zip(self._models, there, strict=True)),
                     *(lambda each=each: self._candidate(each) for each in stages)]:  # fmt: skip
            rows.append(make())
            seen(rows[-1])
        for path in self._work.glob(f"{_PASS_PREFIX}*"):
            shutil.rmtree(path)
        asked = {
            "model": self._model,
            "data": self._evaluation.data,
            "bytes": self._bytes,
            "gguf_bytes": self._original.gguf_bytes,
        }
        told = _COMPARED.validate_python({**asked, **found, "rows": []})
        return replace(told, rows=rows, statistics=tuple(self._statistics()))

    def _statistics(self) -> Iterator[SharedStatistics]:
        """Costs of the calibration passes that several rows shared."""
        for shared in dict.fromkeys(one.identity for one in self._passes.values()):
            if self._journal.is_done(f"measured {shared}"):
                told: dict[str, Any] = self._journal.units[f"measured {shared}"].told
                yield SharedStatistics(**told)

    @staticmethod
    def _check_any(planned: Sequence[object]) -> None:
        """Raise `UsageError` if there is a row, and every one is an error: before the original is measured."""
        failed = [row for row in planned if isinstance(row, ComparedModel)]
        if failed and len(failed) == len(planned):
            listed = "\n".join(f"{row.label}: {row.error}" for row in failed)
            raise UsageError(f"None of these models can be made or read:\n{listed}")

    def _opened(self, path: str) -> Checkpoint | ComparedModel:
        """A model that is there already; a row that says why if it cannot be read, or not be compared."""
        try:
            checkpoint = Checkpoint.open(path)
            check_comparable(self._original, checkpoint, load_tokenizer(checkpoint.path))
        except MoetoolError as error:
            return ComparedModel(name=Path(path).name or path, method=None, asked=None, error=str(error))
        return checkpoint

    def _there(self, path: str, checkpoint: Checkpoint | ComparedModel) -> ComparedModel:
        if isinstance(checkpoint, ComparedModel):
            return checkpoint
        name = Path(path).name or path
        try:
            size = checkpoint.given_bytes
            found = self._noted(self._key("model", _known_by("model", checkpoint)), self._measure(path))
            saved = 1 - size / self._bytes
            row = {"name": name, "method": None, "asked": None, "saved": saved, "bytes": size, "path": path}
            return _ROW.validate_python({**row, **found})
        except InterruptedRunError:
            raise
        except MoetoolError as error:
            return ComparedModel(name=name, method=None, asked=None, error=str(error))

    def _wanted(self, candidate: Candidate) -> _Wanted | ComparedModel:
        """What is to be made; a row that says why if that cannot be."""
        try:
            stage = candidate.kind(candidate.kind.opened(self._original), candidate.options)
            stage.plan()  # says what is not possible
            states = {key: told for name, read in stage.inputs().items() for key, told in _known_by(name, read).items()}
            sources = {**stage.sources(), **states, **self._calibration}
            made, recipe = fingerprint(candidate.kind.name, sources, stage.recipe()), stage.shared_recipe()
            return _Wanted(candidate, stage, made, None if recipe is None else fingerprint("shared", sources, recipe))
        except MoetoolError as error:
            return ComparedModel(
                name=candidate.name, method=candidate.kind.name, asked=candidate.asked, error=str(error)
            )

    def _candidate(self, wanted: _Wanted | ComparedModel) -> ComparedModel:
        if isinstance(wanted, ComparedModel):
            return wanted
        candidate, made = wanted.candidate, wanted.made
        row = {"name": candidate.name, "method": candidate.kind.name, "asked": candidate.asked}
        target = self._target(wanted)
        try:
            told = self._noted(
                self._key("made", {"model": made}),
                lambda: {**self._made(wanted, target), **self._measure(str(target))()},
            )
        except InterruptedRunError:
            raise
        except MoetoolError as error:
            return _ROW.validate_python({**row, "error": str(error)})
        if not self._keep and target.exists():
            shutil.rmtree(target)
        return _ROW.validate_python({**row, **told, "path": str(target) if target.exists() else None})

    def _target(self, wanted: _Wanted) -> Path:
        asked = wanted.candidate.asked
        ratio = "" if asked is None else f"-{asked * 100:g}"
        return self._work / f"{wanted.candidate.name}{ratio}-{wanted.made[:12]}"

    def _made(self, wanted: _Wanted, target: Path) -> dict[str, object]:
        """Make a model, or what is missing of it; its size, and what that took."""
        candidate, key, was_begun = wanted.candidate, f"made {wanted.made}", target.exists()
        measured = self._measured(wanted)
        self._progress.log(f"Making {target.name}.")
        result = run_stage(
            candidate.kind,
            self._model,
            target,
            candidate.options,
            resume=True,
            progress=self._progress,
            measured=measured,
            goes_on=True,
        )
        if result.status == "finished" and self._journal.is_done(key):
            return self._journal.units[key].told
        assert result.sizes is not None
        size = result.sizes.bytes_after
        return self._noted(
            key,
            lambda: {
                "saved": 1 - size / self._bytes,
                "bytes": size,
                "seconds": None if was_begun else result.seconds,
                "peak_memory_bytes": result.peak_memory_bytes,
            },
        )

    def _measured(self, wanted: _Wanted) -> Path | None:
        """Where it was measured for a model and others; that is done now if several of them have not been begun."""
        if (shared := self._passes.get(wanted.made)) is None:
            return None
        new = [each for each in shared.wanted if not self._is_begun(each)]
        if not shared.directory.exists() and (wanted not in new or len(new) < 2):
            return None
        seconds = shared.run(self._progress)
        self._noted(f"measured {shared.identity}", lambda: {"rows": shared.rows, "seconds": seconds})
        return shared.directory

    def _is_begun(self, wanted: _Wanted) -> bool:
        return self._journal.is_done(f"made {wanted.made}") or self._target(wanted).exists()

    def _measure(self, path: str) -> Callable[[], dict[str, object]]:
        """Return what evaluates a model against the original."""
        return lambda: self._evaluated(path, self._evaluation.model_copy(update={"against": self._model}))

    def _evaluated(self, path: str, options: EvaluationOptions) -> dict[str, object]:
        found = perplexity(path, options, self._progress)
        if found.against is not None:
            return {
                **_fields(found, "perplexity", "texts", "over_texts", "calibration"),
                **_fields(found.against, "excess", "excess_error", "kl", "agreement"),
            }
        return _fields(found, "perplexity", "nll", "windows", "tokens", "sequence_length", "begin", "texts")

    def _key(self, what: str, sources: Mapping[str, str]) -> str:
        return fingerprint(what, {**sources, **_known_by("original", self._original)}, self._asked)

    def _noted(self, key: str, make: Callable[[], dict[str, object]]) -> dict[str, Any]:
        """What the journal has under a key; made and noted if it has nothing."""
        if not self._journal.is_done(key):
            self._journal.done(key, told=make())
        return self._journal.units[key].told


def _known_by(name: str, checkpoint: Checkpoint) -> dict[str, str]:
    """What tells a checkpoint from others: its fingerprint, and where that is not over every byte, of each weight file
    what the hub says that it holds, or else when it was written."""
    found = {name: checkpoint.fingerprint()}
    for file, state in file_states(checkpoint).items():
        found[f"{name}/{file}"] = hub_sha256(checkpoint.path / file) or str(state["written"])
    return found


def _fields(told: Printed, *names: str) -> dict[str, object]:
    """Some of a record's fields, as JSON; without those that hold their default."""
    return {name: value for name, value in told.to_json().items() if name in names}


def text_digests(data: str) -> dict[str, str]:
    """Digests of the files of a text; what lies on no disk here is known by its name alone."""
    files = [file for path in found_here(spec.source for spec in parse_data(data)) for file in data_files(path)]
    if any(spec.is_bundled for spec in parse_data(data)):
        files.append(PACKED)
    return {str(file): fast_digest(file) for file in files}


def _passes(wanted: Iterable[_Wanted], work: Path) -> dict[str, _StatisticsPass]:
    """Statistics passes that serve several models, by the fingerprint `made` of each of these models."""
    groups: dict[str, dict[str, _Wanted]] = {}
    for each in wanted:
        if each.shared is not None:
            groups.setdefault(each.shared, {})[each.made] = each
    found = {}
    for shared, several in groups.items():
        if len(several) > 1:
            identity = fingerprint("measured", {"shared": shared}, {"for": sorted(several)})
            one = _StatisticsPass(work / f"{_PASS_PREFIX}{identity[:12]}", identity, list(several.values()))
            found.update(dict.fromkeys(several, one))
    return found
