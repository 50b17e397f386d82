"""Stages that measure what every form of every matrix loses, buy the mix that loses least, and write it.

The order of a compression, from object to object (`d2moe` has `LayerFactors` at 4, `FactoredLayers` at 7 and 9):

 1. `MixingStage.plan` takes target, schemes and costs from file headers; `run` goes by the same cached values.
 2. `CalibratedJob` draws the windows of text and opens the model, one layer of which is in memory at a time.
 3. `CalibratedJob.reverse` runs the gradient windows forwards to the loss and back (or `forward_visiting`, forwards
    alone, where gradients decide nothing), and stops at each MoE layer, where
 4. `MixedLayers` merges the base, takes deltas to it in every scheme, and writes the estimated losses of all forms.
 5. `Choosing.mix` spends the target on all layers at once (`budget.spending`): a `LayerLayout` for each layer.
 6. `MixedLayers.keep_bases` keeps, of each layer's bases, the one of the scheme that was chosen.
 7. `write_model` goes through the shards of an `OutputPlan`, and has `Encoding` (`EncodedLayers`) make their layers.
 8. `EncodedLayers.make` moves its `ForwardPass` on, which runs all windows through the model up to that layer, where
 9. `MixedLayers` collects the Gram matrices of inputs and encodes the deltas into a file, refined if that is asked for.
10. Base and encoded deltas go into the shard, whose file ends those of its layers; config and index come last.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from moetool.architectures import Role
from moetool.bases.choices import Merge
from moetool.calibration.routed_tokens import RoutedTokens
from moetool.compress.delta_forms import agreed_layouts, refuse_compressed
from moetool.compress.encoded_layers import encoded_bytes
from moetool.compress.mixing.choosing import Choosing, Mix, note_on_including, notes_on, notes_on_size
from moetool.compress.mixing.layers import MixedLayers
from moetool.compress.mixing.measuring import MixingOptions
from moetool.compress.mixing.schemes import Granularity, StorageScheme, average_bits
from moetool.compress.refining.codes import BATCH_TOKENS
from moetool.compress.refining.layer import MOST_TOKENS
from moetool.compress.results import LayersResult, MixedResult
from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.layer_memory import LayerMemory, Measuring
from moetool.costs.matrix_work import refine
from moetool.costs.phases import gradient_cost, menu_phases, with_codes_beside
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout
from moetool.job.calibrated import CalibratedJob
from moetool.job.including import (
    bits_left,
    included_bytes,
    included_in_words,
    included_shapes,
    including,
    including_saves,
    worth_including,
)
from moetool.job.job import Job
from moetool.job.options import CalibrationOptions, IncludeOptions, names_of_included
from moetool.job.plan import Plan, calibration_cost, experts_at_once
from moetool.job.result import Json
from moetool.job.shards import OutputPlan
from moetool.job.stage import AnyStage, Stage
from moetool.job.writing import entry_for, original_bytes, original_size, write_model
from moetool.representations import Representation

MixingOptionsT = TypeVar("MixingOptionsT", bound=MixingOptions)
_MEASURING = {
    *CalibrationOptions.model_fields,
    *IncludeOptions.model_fields,
    "compute_dtype",
    "group_size",
    "sensitivity",
    "trellis",
}


class MixingStage(Stage[MixingOptionsT]):
    """A stage that chooses a form for each matrix within a budget. Methods differ in the schemes that they offer, and
    in how the target is given."""

    @abstractmethod
    def schemes(self, delta_bits: float | None, matrix_bits: float | None) -> Sequence[StorageScheme]:
        """Storage schemes to choose from, the unrotated ones first.

        Args:
            delta_bits: average bits that the target leaves for each number of a delta; `None` if that is not known.
            matrix_bits: average bits that it leaves for each number of a matrix without a base.
        """

    @property
    @abstractmethod
    def ratio(self) -> float | None:
        """Share of the weight files' bytes to save; `None` if the target is set by another option."""

    @property
    def merge(self) -> Merge:
        """The rule by which a layer's base is merged from its experts."""
        return "fisher"

    @property
    def granularity(self) -> Granularity:
        """The set of matrices that have to have one form in common; `matrix` if each may have its own."""
        return "matrix"

    @property
    def given(self) -> Mapping[int, LayerLayout] | None:
        """Layouts by layer that are to be followed; `None` if forms are to be chosen."""
        return None

    @property
    def asked(self) -> str | None:
        """The option by which the user has set the target, as typed; `None` if it follows from other options."""
        return None if self.ratio is None else self.options.target_option

    @property
    def needs_text(self) -> bool:
        return True

    @property
    def share_in_numbers(self) -> float:
        shape, dtype = self.source.experts.shape, self.source.dtype
        return max(form.share_in_numbers(shape.matrix(role), dtype) for form, role in self.possible_forms)

    @property
    def possible_forms(self) -> set[tuple[Representation, Role]]:
        """Forms that the output may have, of deltas, matrices and bases, each with its role."""
        offered = {(form, role) for scheme in self.offered for role, own in scheme.forms.items() for form in own}
        return offered | {(form, role) for scheme in self.offered for role, form in scheme.base.items()}

    # What plan and run both go by.

    @cached_property
    def target(self) -> int:
        """Largest size of the output's weight files, in bytes."""
        return self.smallest if self.ratio is None else round(original_bytes(self.source) * (1 - self.ratio))

    @property
    def smallest(self) -> int:
        """Bytes of the weight files with the smallest form of every matrix."""
        return min(self._smallest.values())

    @cached_property
    def _smallest(self) -> dict[bool, int]:
        """Bytes of the weight files with the smallest forms on a base (`True`), and without one (`False`)."""
        first: dict[bool, StorageScheme] = {}
        for scheme in self.schemes(1.0, 1.0):
            first.setdefault(scheme.has_base, scheme)
        return {has_base: self.choosing([scheme]).smallest for has_base, scheme in first.items()}

    @cached_property
    def average_bits(self) -> dict[bool, float]:
        """Average bits of a number on a base (`True`) and without one (`False`) that the target leaves, beside scales.

        The smallest form of a delta has no bits, that of a matrix without a base one.
        """
        return {
            has_base: (0 if has_base else 1) + average_bits(self.source.experts, self.target - smallest)
            for has_base, smallest in self._smallest.items()
        }

    @cached_property
    def offered(self) -> Sequence[StorageScheme]:
        """The storage schemes whose forms are measured and chosen from, by the bits that the target leaves."""
        return self.schemes(self.average_bits.get(True), self.average_bits.get(False))

    @cached_property
    def _choice(self) -> Choosing:
        """The choice among the schemes that are offered, which counts the same bytes for plan, trials and result."""
        return self.choosing(self.offered)

    def choosing(self, schemes: Sequence[StorageScheme]) -> Choosing:
        """Make the search for the best forms within a budget, among those that the given schemes offer."""
        return Choosing(self.source, schemes, self.granularity, self.options.shard_size)

    @cached_property
    def experts_at_once(self) -> int:
        """Number of experts of a layer that are in memory together, by `--memory`."""
        return experts_at_once(self._memory, self.options)

    # Plan.

    def plan(self) -> Plan:
        refuse_compressed(self.source)
        for scheme in self.offered:
            scheme.rotation_seeds(self.source.experts.shape, 0)  # refuses inputs that cannot be rotated
        self._check_target()
        source, options, reader = self.source, self.options, self.source.experts
        output = self.target if self.given is not None else min(self.target, self._choice.largest)
        cost, shape, at_once = self._cost, reader.shape, self.experts_at_once
        stored = [(role, form) for scheme in self.offered for role, form in scheme.base.items()]
        bases = sum(form.nbytes(shape.matrix(role), reader.dtype) for role, form in stored)
        forward = cost.forward_scratch(reader, at_once) + encoded_bytes(reader, output, options.shard_size)
        few = gradient_cost(cost)
        if self._takes_gradients:
            measuring = cost.backward_scratch(reader, at_once)
        else:
            measuring = few.forward_scratch(reader, at_once)
            forward += few.boundary_bytes(shape.hidden)  # the last, which stays
        if options.refine:
            forward += RoutedTokens.nbytes(cost.samples, cost.length, shape.hidden)
        metrics = 4 * shape.hidden**2 if options.refine or options.in_turn else 0
        schemes = [(scheme.forms, scheme.base) for scheme in self.offered]
        refining = refine(shape, options.refine, BATCH_TOKENS) if options.refine else None
        size = moe_size(reader, at_once)
        gradients, in_turn = self._takes_gradients, options.in_turn
        phases = menu_phases(cost, size, output, schemes, refining, gradients=gradients, in_turn=in_turn)
        return Plan(
            stage=self.name,
            input_bytes=source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=max(measuring, forward) + len(reader.moe_layers) * (bases + metrics) + included_bytes(source),
            memory_bytes=self._memory.nbytes(at_once),
            phases=with_codes_beside(phases, cost, included_shapes(source)),
            details={
                "original_bytes": original_bytes(source),
                **self.budget_details(),
                "moe_layers": len(reader.moe_layers),
                "experts": shape.experts,
                "experts_at_once": at_once,
                "forms_per_matrix": sum(len(scheme.forms["down"]) for scheme in self.offered),
            },
        )

    def budget_details(self) -> Mapping[str, Json]:
        """Fields of `--dry-run` that say what the budget allows: the smallest size in bytes, and bits per number."""
        left = bits_left(self.source, min(self.target, self._choice.largest))
        return {
            "smallest_possible_bytes": self.smallest,
            "bits_per_number": round(next(iter(self.average_bits.values())), 2),
            "bits_per_expert_weight": round(left, 2),
        }

    def _check_target(self) -> None:
        """Raise `UsageError` for a target that the smallest forms exceed, or that is no smaller than the original."""
        original = original_bytes(self.source)
        if self.asked is None or self.smallest <= self.target < original:
            return
        raise UsageError(
            f"{self.asked} is not possible here: the weight files take {original_size(self.source)}, and "
            f"{self.options.target_limits(self.smallest, original)}."
        )

    @cached_property
    def _cost(self) -> CalibrationCost:
        return calibration_cost(self.source, self.options, self.options, gradients=self._takes_gradients)

    @cached_property
    def _takes_gradients(self) -> bool:
        """Whether gradients of the loss say how errors count, merge a base, or choose codes beside the experts."""
        options, is_given = self.options, self.given is not None
        is_weighed = options.sensitivity != "none" or options.refine > 0 or bool(self.source.included)
        return is_weighed or is_given or any(scheme.has_base for scheme in self.offered)

    @cached_property
    def _memory(self) -> LayerMemory:
        reader, regression = self.source.experts, self.merge == "regmean"
        base = Measuring.fisher(reader.shape, regression=regression) if self._takes_gradients else Measuring()
        refined_on = MOST_TOKENS if self.options.refine else 0
        codes = Measuring.codes(reader.shape, refined_on=refined_on, in_turn=self.options.in_turn)
        beside = Measuring.beside(included_shapes(self.source))
        return self._cost.layer_memory(reader, base, codes, beside, gradients=self._takes_gradients)

    # Run.

    def shared_recipe(self) -> Mapping[str, object] | None:
        """The options that decide what a form loses, whatever else is offered; `None` if there is nothing to choose."""
        if self.given is not None:
            return None
        own = self.options.model_dump(mode="json", include=_MEASURING)
        decided = {"merge": self.merge, "refined": self.options.refine > 0, "gradients": self._takes_gradients}
        return {"stage": "mixing", **own, **decided}

    def measure(self, job: Job, beside: Sequence[AnyStage]) -> None:
        others = [scheme for other in beside if isinstance(other, MixingStage) for scheme in other.offered]
        self.measured(job, others)

    def measured(self, job: Job, more: Sequence[StorageScheme] = ()) -> MixedLayers:
        """Measure all layers: the losses of every form on offer, and of the forms of `more` schemes."""
        gradients = self._takes_gradients
        calibrated = CalibratedJob(job, self.options, gradients=gradients, experts_at_once=self.experts_at_once)
        schemes = list({scheme.identity: scheme for scheme in (*self.offered, *more)}.values())
        return MixedLayers(job, calibrated, self.options, schemes, self.merge, self.given, gradients=gradients)

    def run(self, job: Job) -> LayersResult:
        layers = self.measured(job)
        return self.write(job, layers, self.mix(layers, self.target), self.target)

    def mix(self, layers: MixedLayers, target: int) -> Mix:
        """Choose the mix of at most `target` bytes that loses least, equal in all processes, or take the one that was
        given."""
        if self.given is not None:
            return Mix(self.given, {}, {layer: {} for layer in self.given})
        ranks, found = layers.job.ranks, self._choice.mix(target, layers.losses())
        schemes, losses = ranks.broadcast((dict(found.schemes), dict(found.losses)))
        return Mix(agreed_layouts(ranks, found.layouts), schemes, losses)

    def write(self, job: Job, layers: MixedLayers, mix: Mix, target: int) -> MixedResult:
        """Encode all layers in the forms of a mix for a `target`, and write the model."""
        if job.ranks.is_first:
            layers.keep_bases(mix)
        job.ranks.barrier()
        encoding, output = layers.encoding(mix.layouts), OutputPlan(self.source, mix.layouts, self.options.shard_size)
        several = len(self.offered) > 1
        write_model(
            job,
            output,
            encoding.tensors,
            entry=entry_for(mix.layouts, self.source, method=self.name),
            statistics=layers.statistics,
            calibration=layers.facts,
            layers=lambda: layers.results(mix, with_schemes=several),
            making=encoding,
        )
        original = original_bytes(self.source)
        ratio = 1 - target / original if self.ratio is None else self.ratio
        notes = [*(notes_on(mix) if several else ()), *notes_on_size(output.nbytes, original, ratio)]
        if self.source.included:
            notes.append(f"Also quantized: {included_in_words(self.source)}.")
        elif bits := worth_including(self.source, output.nbytes):
            saves = [including_saves(self.source, own)[kind] for kind, own in bits.items()]
            left = bits_left(self.source, output.nbytes)
            asked = IncludeOptions(include=names_of_included(bits))
            in_words = included_in_words(including(self.source, asked))
            notes.append(note_on_including(bits, in_words, saves, output.nbytes, left))
        if stored := len(self.source.experts.moe_layers) - len(mix.layouts):
            layers_stored = "one layer" if stored == 1 else f"{stored} layers"
            notes.append(f"Experts of {layers_stored} stay as they are stored: that loses nothing, for its bytes.")
        return MixedResult(
            calibration=layers.facts, ratio=ratio, layers=layers.results(mix, with_schemes=several), notes=notes
        )
