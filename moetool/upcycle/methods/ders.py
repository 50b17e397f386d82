"""DeRS upcycling: experts that share the dense FFN and differ by few numbers, which are all that training adds."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from moetool.architectures import Role
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout
from moetool.job.options import RunOptions
from moetool.representations import Representation
from moetool.representations.low_rank import LowRank
from moetool.representations.sparse import Sparse
from moetool.upcycle.experts import Copies, Experts
from moetool.upcycle.stage import Upcycle, UpcycleOptions


class DersOptions(UpcycleOptions):
    """What is a difference."""

    shared_expert: bool = Field(
        False, description="Make the shared expert of --shared a difference to the same FFN, too."
    )


class _Ders(Upcycle):
    """Every expert is `base + difference`, the base the dense FFN, the difference zero to begin with."""

    options: DersOptions

    def experts(self) -> Experts:
        return Copies(self.dense)

    @abstractmethod
    def form(self, layer: int, expert: int, role: Role) -> Representation:
        """How one difference is stored."""

    @property
    def features(self) -> tuple[str, ...]:
        return (*super().features, *(("shared_on_base",) if self.options.shared_expert else ()))

    def layouts(self) -> Mapping[int, LayerLayout]:
        return self._layouts

    @cached_property
    def _layouts(self) -> dict[int, LayerLayout]:
        mixture, extended = self.mixture, self.options.shared_expert
        if extended and mixture.shared == "none":
            raise UsageError("--shared-expert: there is none without --shared half, xft or med.")
        shape = self.dense.mixture_shape(mixture)
        count = range(shape.experts + extended)
        return {
            layer: LayerLayout(
                shape,
                {role: tuple(self.form(layer, expert, role) for expert in count) for role in shape.roles},
                shape.intermediate,
            )
            for layer in mixture.layers
        }


class DersLowRankOptions(DersOptions):
    """How many numbers a difference has."""

    rank: int = Field(1, ge=1, description="Rank of every difference.")


class DersLowRank(_Ders):
    """DeRS-LM: low-rank differences."""

    name: ClassVar[str] = "ders-lowrank"
    summary: ClassVar[str] = "the dense FFN once, and low-rank differences that training fills"
    options_type: ClassVar[type[RunOptions]] = DersLowRankOptions
    options: DersLowRankOptions

    def layouts(self) -> Mapping[int, LayerLayout]:
        highest = min(self.dense.hidden, self.dense.intermediate)
        if self.options.rank > highest:
            raise UsageError(
                f"--rank {self.options.rank}: matrices of {self.dense.intermediate} × {self.dense.hidden} have no more "
                f"than {highest}."
            )
        return super().layouts()

    def form(self, layer: int, expert: int, role: Role) -> Representation:
        return LowRank(self.options.rank)


class DersSparseOptions(DersOptions):
    """How many numbers a difference has."""

    drop: float = Field(0.9999, ge=0, lt=1, description="Share of every difference's elements that stay zero.")


class DersSparse(_Ders):
    """DeRS-SM: differences of few elements, whose places follow from the seed."""

    name: ClassVar[str] = "ders-sparse"
    summary: ClassVar[str] = "the dense FFN once, and differences of few elements that training fills"
    options_type: ClassVar[type[RunOptions]] = DersSparseOptions
    options: DersSparseOptions

    def form(self, layer: int, expert: int, role: Role) -> Representation:
        return Sparse.derived(self.options.drop, self.options.seed, layer, expert, role)
