"""What stages that mix forms have in common."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

from moetool.compress.mixing.mixing import Mixing
from moetool.compress.mixing.options import MixingOptions
from moetool.job.job import Job
from moetool.job.stage import AnyStage, Stage

MixingOptionsT = TypeVar("MixingOptionsT", bound=MixingOptions)


class MixingStage(Stage[MixingOptionsT]):
    """A stage that measures what forms lose, and then chooses among them: with others it shares the measuring."""

    @property
    @abstractmethod
    def mixing(self) -> Mixing:
        """What is mixed."""

    @property
    def needs_text(self) -> bool:
        return True

    def shared_recipe(self) -> Mapping[str, object] | None:
        return self.mixing.shared_recipe()

    def measure(self, job: Job, beside: Sequence[AnyStage]) -> None:
        self.mixing.beside(other.mixing for other in beside if isinstance(other, MixingStage)).measure(job)
