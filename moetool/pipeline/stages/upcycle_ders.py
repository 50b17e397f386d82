"""DeRS upcycling: experts that share the dense FFN and differ by few numbers, which are all that training adds."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from moetool.architectures import ROLES, MoEShape, Role
from moetool.conversion.experts import Copies, Experts
from moetool.errors import InvalidInputError
from moetool.pipeline.options import RunOptions
from moetool.pipeline.upcycling import Upcycle, UpcycleOptions
from moetool.representations import Representation
from moetool.representations.layout import LayerLayout
from moetool.representations.low_rank import LowRank
from moetool.representations.sparse import Sparse


class _Ders(Upcycle):
    """Every expert is `base + difference`, the base the dense FFN, the difference zero to begin with."""

    def experts(self) -> Experts:
        return Copies(self.dense)

    @abstractmethod
    def form(self, layer: int, expert: int, role: Role) -> Representation:
        """How one difference is stored."""

    def layouts(self) -> Mapping[int, LayerLayout]:
        return self._layouts

    @cached_property
    def _layouts(self) -> dict[int, LayerLayout]:
        if not self.dense.is_fusable:
            raise InvalidInputError(
                f"--method {self.name} needs feed-forward networks with gates and without biases; those of "
                f"{self.dense.architecture.name} are not. --method vanilla takes them."
            )
        mixture = self.mixture
        shape = MoEShape(mixture.experts, mixture.top_k, self.dense.hidden, mixture.intermediate)
        return {
            layer: LayerLayout(
                shape,
                {role: tuple(self.form(layer, expert, role) for expert in range(mixture.experts)) for role in ROLES},
                mixture.intermediate,
            )
            for layer in mixture.layers
        }


class DersLowRankOptions(UpcycleOptions):
    """How many numbers a difference has."""

    rank: int = Field(1, ge=1, description="Rank of every difference.")


class DersLowRank(_Ders):
    """DeRS-LM: low-rank differences."""

    name: ClassVar[str] = "ders-lowrank"
    summary: ClassVar[str] = "the dense FFN once, and low-rank differences that training fills"
    options_type: ClassVar[type[RunOptions]] = DersLowRankOptions
    options: DersLowRankOptions

    def form(self, layer: int, expert: int, role: Role) -> Representation:
        return LowRank(self.options.rank)


class DersSparseOptions(UpcycleOptions):
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
