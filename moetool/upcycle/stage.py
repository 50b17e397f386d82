"""What all ways of upcycling to a mixture of whole FFNs share: its shape and its family."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from moetool.checkpoint.dense import DenseModel
from moetool.format.layout import LayerLayout
from moetool.format.moe_spec import Mixture, Shared
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.upcycle.experts import Experts
from moetool.upcycle.lint import lint
from moetool.upcycle.routed import RoutedConversion, RoutedOptions
from moetool.upcycle.targets import Target, choose_target
from moetool.upcycle.upcycling import Upcycled


class UpcycleOptions(RoutedOptions):
    """How many experts, where, and in which family."""

    shared: Shared = Field(
        "none", description="The original FFN as a shared expert: half of the output, or as XFT or Med-MoE weigh it."
    )
    target: str = Field(
        "auto", description="Family to write: mixtral, qwen2_moe, … or moetool for its own module (auto: the first "
        "that can express the model)."
    )  # fmt: skip


class Upcycle(RoutedConversion[UpcycleOptions]):
    """A dense model into a mixture of experts."""

    options_type: ClassVar[type[RunOptions]] = UpcycleOptions
    method_of: ClassVar[str | None] = "upcycle"

    @abstractmethod
    def experts(self) -> Experts:
        """What every expert starts as."""

    @property
    def preserves(self) -> bool:
        return self.options.shared != "med"

    @property
    def granularity(self) -> int:
        """Pieces into which each of them is cut."""
        return 1

    def rest(self) -> Sequence[DenseModel]:
        """Models whose mean everything outside the experts is."""
        return [self.dense]

    @cached_property
    def mixture(self) -> Mixture:
        """What is to be made. Raises `UsageError` for numbers that do not fit."""
        options, dense = self.options, self.dense
        return Mixture(
            experts=self.copies * self.granularity,
            top_k=options.top_k * self.granularity,
            intermediate=dense.intermediate // self.granularity,
            layers=self.layers,
            of=dense.layers,
            shared=options.shared,
        )

    @cached_property
    def target(self) -> Target:
        """The family to write."""
        return choose_target(self.options.target, self.features)

    @property
    def features(self) -> tuple[str, ...]:
        """What the family must be able to express, by the names of `FEATURES`."""
        narrow = self.dense.architecture.norm_offset and self.stored_dtype.itemsize < 4
        return (*self.dense.features, *self.mixture.features, *(("narrow_norms",) if narrow else ()))

    def with_router(self, router: Callable[[int], Tensor]) -> Upcycled:
        return Upcycled(
            dense=self.dense,
            target=self.target,
            mixture=self.mixture,
            experts=self.experts(),
            router=router,
            rest=self.rest(),
            dtype=self.new_dtype,
            seed=self.options.seed,
            layouts=self.layouts(),
        )

    def layouts(self) -> Mapping[int, LayerLayout]:
        """By layer, how experts are stored if they are differences to one base; none if they are not."""
        return {}

    def details(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "experts": self.mixture.experts,
            "top_k": self.mixture.top_k,
            "moe_layers": len(self.mixture.layers),
        }

    def record(self) -> dict[str, Any]:
        return {
            "upcycled": {
                "source_config": self.dense.checkpoint.config,
                "target": self.target.name,
                "mixture": self.mixture.to_config(),
                "granularity": self.granularity,
                "dtype": str(self.dense.dtype).removeprefix("torch."),
            }
        }

    def notes(self, config: dict[str, Any]) -> list[str]:
        return lint(self.target, self.dense, self.mixture, config)

    def run(self, job: Job[DenseSource]) -> dict[str, Any]:
        return {"target": self.target.name, **super().run(job)}

    def routers(self, job: Job[DenseSource]) -> Callable[[int], Tensor]:
        copies = super().routers(job)
        return lambda layer: copies(layer).repeat_interleave(self.granularity, 0)
