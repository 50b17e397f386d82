"""Upcycling to an MoE model of whole FFNs: what a method says of it, and the stage that all methods share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeAlias

import torch
from pydantic import Field
from typing_extensions import TypeVar

from moetool.architectures import Role
from moetool.checkpoint.manifest import ExpertOrigin, Provenance, Upcycling
from moetool.convert.results import ConversionResult
from moetool.errors import UsageError
from moetool.format.kinds.moe import MoESpec, Shared
from moetool.format.layout import LayerLayout
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.job.result import Json
from moetool.representations import Representation
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Experts
from moetool.upcycle.lint import lint
from moetool.upcycle.routing import RoutedConversion, RoutedOptions, Rows
from moetool.upcycle.targets import Target, choose_target
from moetool.upcycle.upcycling import Upcycled


class UpcycleOptions(RoutedOptions):
    """Options of upcycling: number of experts, layers, and the family that is written."""

    shared: Shared = Field(
        "none", description="The original FFN as a shared expert: half of the output, or as XFT or Med-MoE weigh it."
    )
    target: str = Field(
        "auto", description="Family to write: mixtral, qwen2_moe, … or moetool for its custom module (auto: the first "
        "that can express the model)."
    )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Experts that a method makes from a dense FFN; methods differ in nothing else.

    Attributes:
        experts: what every expert starts as.
        preserves: whether these compute what the dense FFN computes.
        pieces: into which each copy of the FFN is cut, every one an expert.
        form: how the delta of an expert (layer, expert, role) to the dense FFN is stored, if experts are deltas.
        shared_on_base: whether the shared expert is one of these deltas, too.
    """

    experts: Experts
    preserves: bool = True
    pieces: int = 1
    form: Callable[[int, int, Role], Representation] | None = None
    shared_on_base: bool = False


UpcycleT = TypeVar("UpcycleT", bound=UpcycleOptions, default=UpcycleOptions)


class Upcycle(RoutedConversion[UpcycleT]):
    """Stage that turns a dense model into an MoE model; methods differ in its `start` alone."""

    options_type: ClassVar[type[RunOptions]] = UpcycleOptions

    @cached_property
    @abstractmethod
    def start(self) -> Start:
        """Choose what the experts start as.

        Raises:
            UsageError: the model cannot satisfy the options.
        """

    @property
    def rest(self) -> Sequence[DenseModel]:
        """Dense models whose mean gives all weights outside the experts: only the input, unless a method merges
        several."""
        return [self.dense]

    @property
    def preserves(self) -> bool:
        return self.start.preserves and self.options.shared != "med"

    @cached_property
    def spec(self) -> MoESpec:
        """Numbers of the MoE layers to make.

        Raises:
            UsageError: they do not fit together.
        """
        options, dense, pieces = self.options, self.dense, self.start.pieces
        return MoESpec(
            experts=self.copies * pieces,
            top_k=options.top_k * pieces,
            intermediate=dense.intermediate // pieces,
            layers=self.layers,
            shared=options.shared,
            of=dense.layers,
            hidden=dense.hidden,
            roles=dense.architecture.roles,
            biases=dense.biases,
        )

    @cached_property
    def target(self) -> Target:
        """The family to write, which must be able to express what `FEATURES` names."""
        narrow = self.dense.architecture.norm_offset and self.stored_dtype.itemsize < 4
        on_base = any(layout.is_extended for layout in self.layouts.values())
        asked = (("narrow_norms", narrow), ("shared_on_base", on_base))
        features = (*self.dense.features, *self.spec.features, *(name for name, wanted in asked if wanted))
        return choose_target(self.options.target, features)

    @cached_property
    def layouts(self) -> dict[int, LayerLayout]:
        """Layouts by layer of experts that are deltas to one base, the dense FFN; empty if they are not deltas."""
        if (form := self.start.form) is None:
            return {}
        extended = self.start.shared_on_base
        if extended and self.spec.shared == "none":
            raise UsageError("--shared-expert: there is none without --shared half, xft or med.")
        dense = self.dense.architecture
        if extended and (dense.is_transposed or dense.kept):
            why = "weights [in, out] (Conv1D)" if dense.is_transposed else "activations with numbers of their own"
            raise UsageError(
                f"--shared-expert: the networks of {dense.name} have {why}, which cannot be a delta to the base. "
                "Leave it out."
            )
        shape = self.spec.shape
        count = range(shape.experts + extended)
        return {
            layer: LayerLayout(
                shape,
                {role: tuple(form(layer, expert, role) for expert in count) for role in shape.roles},
                shape.intermediate,
            )
            for layer in self.spec.layers
        }

    def routed_by(self, rows: Rows) -> Upcycled:
        return Upcycled(
            dense=self.dense,
            target=self.target,
            spec=self.spec,
            experts=self.start.experts,
            router=lambda layer: rows(layer).repeat_interleave(self.start.pieces, 0),
            rest=self.rest,
            dtype=self.new_dtype,
            seed=self.options.seed,
            layouts=self.layouts,
        )

    def details(self) -> dict[str, Json]:
        return {
            "target": self.target.name,
            "experts": self.spec.experts,
            "top_k": self.spec.top_k,
            "moe_layers": len(self.spec.layers),
        }

    def provenance(self) -> Provenance:
        dense = self.dense.checkpoint
        return Provenance(
            upcycled=Upcycling(
                source_config=dense.config,
                dtype=str(self.dense.dtype).removeprefix("torch."),
                target=self.target.name,
                mixture=self.spec.told(),
                granularity=self.start.pieces,
            ),
            experts=(ExpertOrigin(model=dense.source, fingerprint=dense.fingerprint()),) * self.spec.experts,
        )

    def notes(self, config: dict[str, object]) -> list[str]:
        notes = lint(self.target, self.dense, self.spec, config)
        if self.start.pieces > 1 and self.target.is_native:
            notes.append(
                "run in 16 bits, two copies' logits are sometimes equal (bfloat16: for about 1 token in 300 per layer) "
                f"and top-k may then take pieces of both: {self.target.name} routes in the model's dtype, --target "
                "moetool in fp32"
            )
        return notes

    def run(self, job: Job[DenseSource]) -> ConversionResult:
        return replace(super().run(job), target=self.target.name)


MethodT = TypeVar("MethodT", bound=UpcycleOptions)
Begin: TypeAlias = Callable[[DenseModel, MethodT, torch.dtype], Start]


def method(name: str, summary: str, options: type[MethodT]) -> Callable[[Begin[MethodT]], type[Upcycle]]:
    """Make a method of upcycling of a function `(dense model, options, dtype of the result) -> Start`.

    Args:
        name: what `upcycle --method` calls it.
        summary: one line for `list methods`.
        options: what it can be told.
    """

    def stage(begin: Begin[MethodT]) -> type[Upcycle]:
        def start(self: Upcycle) -> Start:
            assert isinstance(self.options, options)
            return begin(self.dense, self.options, self.stored_dtype)

        own = {"name": name, "summary": summary, "options_type": options, "start": cached_property(start)}
        return type(begin.__name__, (Upcycle,), {**own, "__module__": begin.__module__, "__doc__": begin.__doc__})

    return stage
