"""One statistics pass for several models that are to be made."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moetool.compare.candidates import Candidate
from moetool.errors import MoetoolError
from moetool.job.execute import measure_stages
from moetool.job.plan import fingerprint
from moetool.job.progress import Progress
from moetool.job.stage import AnyStage

PASS_PREFIX = "statistics-"  # of where passes are done, of this comparison or of one before it with other rows


@dataclass(frozen=True)
class Wanted:
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
class StatisticsPass:
    """One calibration pass whose statistics several candidates share.

    Attributes:
        directory: where it is done.
        identity: a fingerprint of it.
        wanted: for what, two or more.
    """

    directory: Path
    identity: str
    wanted: list[Wanted] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """Labels of the rows that share the pass."""
        return [each.candidate.label for each in self.wanted]

    def run(self, progress: Progress) -> float | None:
        """Do it, or what is missing of it; the seconds, if it was all of it."""
        if not self.directory.exists():
            progress.log(f"One statistics pass shared by {', '.join(self.rows)}.")
        return measure_stages([each.stage for each in self.wanted], self.directory, self.identity, progress)


def passes(wanted: Iterable[Wanted], work: Path) -> dict[str, StatisticsPass]:
    """Statistics passes that serve several models, by the fingerprint `made` of each of these models."""
    groups: dict[str, dict[str, Wanted]] = {}
    for each in wanted:
        if each.shared is not None and _is_possible(each.stage):
            groups.setdefault(each.shared, {})[each.made] = each
    found = {}
    for shared, several in groups.items():
        if len(several) > 1:
            identity = fingerprint("measured", {"shared": shared}, {"for": sorted(several)})
            one = StatisticsPass(work / f"{PASS_PREFIX}{identity[:12]}", identity, list(several.values()))
            found.update(dict.fromkeys(several, one))
    return found


def _is_possible(stage: AnyStage) -> bool:
    try:
        stage.plan()
    except MoetoolError:
        return False  # its row says why
    return True
