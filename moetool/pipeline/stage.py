"""What a stage is: options, a plan from headers alone, and the work."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from moetool.pipeline.job import Job, Source
from moetool.pipeline.options import RunOptions, fit_context
from moetool.pipeline.plan import Plan

OptionsT = TypeVar("OptionsT", bound=RunOptions)

# Options that say where and how a job runs; the result does not depend on them.
_INCIDENTAL = {"device", "memory", "disk"}


class Stage(ABC, Generic[OptionsT]):
    """One step from a checkpoint to a checkpoint. A file of `stages/` that defines a subclass adds a stage."""

    name: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[RunOptions]]
    writes_model: ClassVar[bool] = True
    is_method: ClassVar[bool] = False  # offered by `compress --method`

    def __init__(self, source: Source, options: OptionsT) -> None:
        self.source, self.options = source, fit_context(options, source.checkpoint.config)

    @abstractmethod
    def plan(self) -> Plan:
        """Costs, from headers and config. Raises for options that this input cannot satisfy."""

    @abstractmethod
    def run(self, job: Job) -> dict[str, Any]:
        """Do it. Returns what is worth telling beyond sizes and time."""

    def sources(self) -> Mapping[str, str]:
        """Fingerprints of everything that is read."""
        return {"input": self.source.checkpoint.fingerprint()}

    def recipe(self) -> dict[str, Any]:
        """The options that decide the result, for the manifest."""
        return {"stage": self.name, **self.options.model_dump(mode="json", exclude=_INCIDENTAL)}
