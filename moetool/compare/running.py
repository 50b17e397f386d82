"""Make every model, measure it, note the row, delete it: one after the other, and again where it was left."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetool.calibration.data import data_files, parse_data
from moetool.checkpoint.files import fast_digest
from moetool.checkpoint.reader import Checkpoint
from moetool.compare.candidates import Candidate
from moetool.compare.options import CompareOptions, chosen
from moetool.compare.told import Compared, ComparedModel
from moetool.errors import InterruptedRunError, MoetoolError, UsageError
from moetool.job.execute import output_directory, run_stage
from moetool.job.journal import Journal
from moetool.job.lock import Lock
from moetool.job.plan import fingerprint
from moetool.job.processes import processes
from moetool.job.progress import Progress
from moetool.job.result import Printed
from moetool.job.stage import found_here
from moetool.measure.perplexity import EvaluationOptions, perplexity

_JOURNAL, _LOCK = "journal.jsonl", ".moetool-compare"
_EVALUATION = frozenset(EvaluationOptions.model_fields)
_INCIDENTAL = {"device"}  # of an evaluation


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
    half made is gone on with. Statistics are each candidate's own; one pass for several would be made in `_made`, which
    gets the candidates of a method one after the other.

    Args:
        model: the original.
        options: of the measurement.
        wanted: what to make of it.
        work: where models are made, and rows noted; new, empty, or an earlier comparison's.
        keep: leave the models there.
        progress: told where it is.
        seen: called with every row as soon as there is one.

    Raises:
        InterruptedRunError: it was stopped; the same call goes on.
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
            raise InterruptedRunError(f"Stopped. What is done is noted in {work}: the same command goes on.") from error


class _Comparing:
    """One original, one text."""

    def __init__(self, model: str, options: CompareOptions, work: Path, keep: bool, progress: Progress) -> None:
        self._model, self._work, self._keep, self._progress = model, work, keep, progress
        self._journal = Journal(work / _JOURNAL, "compare")
        self._evaluation = EvaluationOptions.model_validate(chosen(options, _EVALUATION))
        self._original = Checkpoint.open(model)
        self._bytes = self._original.weight_bytes
        self._asked = {
            "evaluation": self._evaluation.model_dump(mode="json", exclude=_INCIDENTAL),
            "text": text_digests(self._evaluation.data),
        }
        self._calibration = text_digests(options.calibration) if options.calibration else {}
        self._models = options.models

    def all(self, wanted: Iterable[Candidate], seen: Callable[[ComparedModel], None]) -> Compared:
        """The table; every row is `seen` when it is there."""
        found = self._noted(self._key("original", {}), lambda: self._evaluated(self._model, self._evaluation))
        rows = []
        for make in [*(lambda path=path: self._there(path) for path in self._models),
                     *(lambda each=each: self._candidate(each) for each in wanted)]:  # fmt: skip
            rows.append(make())
            seen(rows[-1])
        return Compared(model=self._model, data=self._evaluation.data, bytes=self._bytes, **found, rows=rows)

    def _there(self, path: str) -> ComparedModel:
        name = Path(path).name or path
        try:
            checkpoint = Checkpoint.open(path)
            size = checkpoint.weight_bytes
            found = self._noted(self._key("model", {"model": checkpoint.fingerprint()}), self._measure(path))
            saved = 1 - size / self._bytes
            return ComparedModel(name=name, method=None, asked=None, saved=saved, bytes=size, path=path, **found)
        except InterruptedRunError:
            raise
        except MoetoolError as error:
            return ComparedModel(name=name, method=None, asked=None, error=str(error))

    def _candidate(self, candidate: Candidate) -> ComparedModel:
        row = ComparedModel(name=candidate.name, method=candidate.kind.name, asked=candidate.asked)
        try:
            stage = candidate.kind(candidate.kind.source_type.of(self._original), candidate.options)
            made = fingerprint(candidate.kind.name, {**stage.sources(), **self._calibration}, stage.recipe())
            ratio = "" if candidate.asked is None else f"-{candidate.asked * 100:g}"
            target = self._work / f"{candidate.name}{ratio}-{made[:12]}"
            told = self._noted(
                self._key("made", {"model": made}),
                lambda: {**self._made(candidate, target, f"made {made}"), **self._measure(str(target))()},
            )
        except InterruptedRunError:
            raise
        except MoetoolError as error:
            return replace(row, error=str(error))
        if not self._keep and target.exists():
            shutil.rmtree(target)
        return replace(row, **told, path=str(target) if target.exists() else None)

    def _made(self, candidate: Candidate, target: Path, key: str) -> dict[str, object]:
        """Make a model, or what is missing of it; its size, and what that took."""
        was_begun = target.exists()
        self._progress.log(f"Making {target.name}.")
        result = run_stage(candidate.kind, self._model, target, candidate.options, resume=True, progress=self._progress)
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

    def _measure(self, path: str) -> Callable[[], dict[str, object]]:
        """How to evaluate a model against the original."""
        return lambda: self._evaluated(path, self._evaluation.model_copy(update={"against": self._model}))

    def _evaluated(self, path: str, options: EvaluationOptions) -> dict[str, object]:
        found = perplexity(path, options, self._progress)
        if found.against is not None:
            return {
                "perplexity": found.perplexity,
                **_fields(found.against, "excess", "excess_error", "kl", "agreement"),
            }
        return _fields(found, "perplexity", "nll", "windows", "tokens", "sequence_length", "begin")

    def _key(self, what: str, sources: Mapping[str, str]) -> str:
        return fingerprint(what, {**sources, "original": self._original.fingerprint()}, self._asked)

    def _noted(self, key: str, make: Callable[[], dict[str, object]]) -> dict[str, Any]:
        """What the journal has under a key; made and noted if it has nothing."""
        if not self._journal.is_done(key):
            self._journal.done(key, told=make())
        return self._journal.units[key].told


def _fields(told: Printed, *names: str) -> dict[str, object]:
    return {name: vars(told)[name] for name in names}


def text_digests(data: str) -> dict[str, str]:
    """Digests of the files of a text; what lies on no disk here is known by its name alone."""
    files = [file for path in found_here(spec.source for spec in parse_data(data)) for file in data_files(path)]
    return {str(file): fast_digest(file) for file in files}
