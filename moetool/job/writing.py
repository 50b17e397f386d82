"""Writing a job's result: weight files as planned, then everything else, the index last."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from moetool.architectures.base import whole_number
from moetool.calibration.collectors import LayerStatistics
from moetool.checkpoint.files import (
    copy_sidecars,
    file_sha256,
    json_bytes,
    patch_config,
    write_bytes,
    write_json,
)
from moetool.checkpoint.identity import check_read
from moetool.checkpoint.manifest import Manifest, Provenance, manifest_of, noted_in, write_manifest
from moetool.checkpoint.names import CARD, CONFIG, INDEX
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.checkpoint.writer import InParts, NotFiniteError, TensorSpec, damaged, is_finite
from moetool.costs.phases import ENCODE, WRITE
from moetool.format.beside import quantized_beside
from moetool.format.entry import format_entry
from moetool.format.kinds import custom_module
from moetool.format.kinds.moe import routed_scale
from moetool.format.layout import LayerLayout
from moetool.format.marker import BESIDE, moetool_entry
from moetool.job.card import SOURCE_CARD, chosen_options, keep_source_card, model_card
from moetool.job.including import included_tensors
from moetool.job.job import Input, Job, Source, SourceT
from moetool.job.progress import phase
from moetool.job.proof import prove
from moetool.job.records import keep_metrics, write_statistics
from moetool.job.result import CalibrationFacts, Printed
from moetool.job.shards import OutputPlan, ShardPlan
from moetool.runtime.memory import return_heap

SHA256 = "sha256"  # of a weight file, in what its unit tells

LayerTensors = Callable[[int, LayerLayout], Iterator[tuple[str, Tensor]]]


class Making(Protocol):
    """Makes what the layers of a shard are written from, shortly before it is written."""

    @property
    def steps(self) -> int:
        """Number of steps that making all layers adds to the progress bar."""

    @property
    def is_chain(self) -> bool:
        """Whether a layer is made after all before it, by all processes together; else each may be made by another."""

    def make(self, layer: int) -> None:
        """Make what a layer needs, if that is not done; layers are asked for in their order, -1 first."""

    def spent(self, layer: int) -> Iterable[Path]:
        """The files that are no longer needed when the layer has been written."""


def write_model(
    job: Job,
    plan: OutputPlan,
    layer_tensors: LayerTensors,
    *,
    entry: Mapping[str, object] | None,
    statistics: Mapping[int, LayerStatistics],
    metrics: Iterable[Path] = (),
    calibration: CalibrationFacts | None = None,
    layers: Callable[[], Mapping[int, Printed]] = dict,
    making: Making | None = None,
) -> None:
    """Write a model whose MoE layers have new layouts: everything else passes through.

    Args:
        job: the job.
        plan: which tensors go where.
        layer_tensors: makes the expert tensors of one MoE layer, by full name on disk, one at a time.
        entry: `quantization_config` to write; `None` leaves an ordinary checkpoint.
        statistics: what was measured, by layer, kept beside the weights for later stages.
        metrics: files that say how errors at the experts' output count together, kept there, too.
        calibration: on which text, for the manifest.
        layers: what the manifest says of each layer, asked for when all are written.
        making: what `layer_tensors` needs to be made before.
    """
    checkpoint = job.source.checkpoint

    def tensors(layer: int) -> Iterator[tuple[str, Tensor]]:
        specs = plan.unit(layer)
        made = layer_tensors(layer, plan.layouts[layer]) if layer in plan.layouts else ()
        included = included_tensors(job, {spec.name for spec in specs})
        return with_the_rest(plan.read, specs, chain(made, included))

    if entry is None and (spec := custom_module(checkpoint.config)) is not None:
        config = patch_config(checkpoint.config, {"quantization_config": format_entry({}, spec)})
    elif entry is None:
        config = patch_config(checkpoint.config, remove=["quantization_config"])
    else:
        config = patch_config(checkpoint.config, {"quantization_config": dict(entry)})
    write_checkpoint(
        job,
        plan,
        tensors,
        config=plan.config(config),
        statistics=statistics,
        metrics=metrics,
        provenance=passed_on(checkpoint),
        calibration=calibration,
        layers=layers,
        making=making,
    )


def with_the_rest(
    read: Callable[[str], Tensor], specs: Iterable[TensorSpec], made: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a unit by name: first those that were made, then the others as `read` gives them."""
    names: set[str] = set()
    for name, tensor in made:
        names.add(name)
        yield name, tensor
    for spec in specs:
        if spec.name not in names:
            yield spec.name, read(spec.name)


def passed_on(checkpoint: Checkpoint) -> Provenance:
    """The upcycling and the origins of experts that a checkpoint's manifest records, if any: an MoE model made from it
    has the same experts, and can still be un-merged."""
    manifest = manifest_of(checkpoint.path)
    return Provenance() if manifest is None else manifest.provenance.model_copy(update={"moefied": None})


def write_checkpoint(
    job: Job[SourceT],
    plan: ShardPlan,
    unit_tensors: Callable[[int], Iterator[tuple[str, Tensor | InParts]]],
    *,
    config: Mapping[str, object],
    statistics: Mapping[int, LayerStatistics] = MappingProxyType({}),
    metrics: Iterable[Path] = (),
    provenance: Provenance | None = None,
    calibration: CalibrationFacts | None = None,
    layers: Callable[[], Mapping[int, Printed]] = dict,
    check: Callable[[Checkpoint], None] | None = None,
    making: Making | None = None,
) -> None:
    """Write a whole checkpoint: shards, sidecars, manifest, model card, config, index.

    Args:
        job: the job.
        plan: which tensors go where.
        unit_tensors: makes the tensors of one layer (-1: of everything else), one at a time.
        config: `config.json` to write.
        statistics: what was measured, by layer, kept beside the weights for later stages.
        metrics: files that say how errors at the experts' output count together, kept there, too.
        calibration: on which text, for the manifest.
        layers: what the manifest says of each layer, asked for when all are written.
        provenance: what the manifest says the model was made of.
        check: is shown the result while nothing can load it yet; what it raises stops the job there.
        making: what `unit_tensors` needs to be made before.
    """
    writer = plan.writer(job.output)
    checkpoint = job.source.checkpoint
    sizes = {shard: float(sum(spec.nbytes for spec in plan.specs(shard))) for shard in range(len(plan.shards))}
    together = making is not None and making.is_chain
    if len(sizes) < job.ranks.size and not together:
        job.progress.log(
            f"{job.ranks.size} processes write {len(sizes)} weight files: a smaller --shard-size gives work to all."
        )

    passed = {shard: len(plan.layers(shard)) for shard in sizes}
    proofs = int(job.options.proof and job.ranks.is_first)
    steps = sum(len(shard) for shard in plan.shards) + (0 if making is None else making.steps) + proofs
    unit = "layers" if making is None else "batches and layers" if together else "layers encoded or written"
    with phase(job.progress, WRITE if making is None else ENCODE, steps, unit):
        for shard in job.share("write", sizes, passed, together=together):
            if making is not None:
                for layer in plan.layers(shard):
                    making.make(layer)
            if together and not job.ranks.is_first:
                continue

            def tensors(shard: int = shard) -> Iterator[tuple[str, Tensor | InParts]]:
                for layer in plan.layers(shard):
                    yield from unit_tensors(layer)
                    return_heap()
                    job.progress.advance()

            try:
                file = writer.write_shard(shard, tensors())
            except NotFiniteError as error:
                _refuse_damaged(checkpoint, error.tensor)
                raise
            spent = [path for layer in plan.layers(shard) for path in making.spent(layer)] if making is not None else []
            job.finish(f"write/{shard}", made=[file], spent=spent, told={SHA256: file_sha256(file)})
        if not job.ranks.is_first:
            return
        files = [writer.file(shard) for shard in sizes]
        made = Checkpoint.unfinished(job.output, dict(config), files)
        if proofs:
            job.interrupt.check()
            job.loaded = prove(made, checkpoint, job.options.memory, job.progress)
            job.progress.advance()
    if check is not None:
        job.interrupt.check()
        check(made)
    known = {writer.file(shard): str(job.workspace.told(f"write/{shard}")[SHA256]) for shard in sizes}
    files += [*copy_sidecars(checkpoint, job.output), *write_statistics(job.output, statistics)]
    files += keep_metrics(job.output, metrics)
    coming = {CONFIG: config, INDEX: writer.index()}
    record_origin(
        job,
        files=files,
        provenance=provenance,
        calibration=calibration,
        layers=layers(),
        coming={name: json_bytes(content) for name, content in coming.items() if content is not None},
        known=known,
        model=(config, plan.nbytes),
    )
    write_json(job.output / CONFIG, config)
    writer.finish()


def _refuse_damaged(checkpoint: Checkpoint, name: str) -> None:
    """Raise `InvalidInputError` if the tensor of that name in a job's input has numbers that are not finite."""
    if name in checkpoint.tensors and not is_finite(checkpoint.read(name)):
        raise damaged(name, checkpoint.path)


def record_origin(
    job: Job[SourceT],
    *,
    files: Iterable[Path],
    provenance: Provenance | None = None,
    calibration: CalibrationFacts | None,
    layers: Mapping[int, Printed] = MappingProxyType({}),
    coming: Mapping[str, bytes] = MappingProxyType({}),
    known: Mapping[Path, str] = MappingProxyType({}),
    model: tuple[Mapping[str, object], int] | None = None,
) -> None:
    """Write the manifest and the model card of a job's result: of `files` that are there, some with digests that are
    `known`, of contents that are `coming`, and of the `model`, if it is one: its config, and bytes of its weights."""
    checkpoint = job.source.checkpoint
    check_read(checkpoint)
    before = manifest_of(noted_in(checkpoint))
    files = [*files, *keep_source_card(checkpoint, job.output)]
    names = {file.relative_to(job.output).as_posix(): file for file in files}
    digests = {name: known.get(file) or file_sha256(file) for name, file in names.items()}
    digests |= {name: hashlib.sha256(content).hexdigest() for name, content in coming.items()}
    manifest = Manifest(
        source=job.named or checkpoint.source,
        source_fingerprint=checkpoint.fingerprint(),
        recipe=dict(job.recipe),
        chosen=chosen_options(job.options, job.recipe, checkpoint.settings),
        seed=getattr(job.options, "seed", 0),  # nothing is random in a job without one
        statistics={} if calibration is None else {"calibration": calibration.to_json()},
        provenance=provenance or Provenance(),
        layers={str(layer): said.to_json() for layer, said in layers.items()},
        lineage=() if before is None else before.origins,
        run=job.workspace.fingerprint,
    )
    card = model_card(manifest, checkpoint, model, has_source_card=SOURCE_CARD in digests)
    encoded = card.encode("utf-8", "backslashreplace")  # names of files may be anything
    digests[CARD] = hashlib.sha256(encoded).hexdigest()
    write_manifest(job.output, manifest.model_copy(update={"files": dict(sorted(digests.items()))}))
    write_bytes(job.output / CARD, encoded)


def down_scale(checkpoint: Checkpoint) -> float:
    """The factor by which upcycling multiplied the experts' down matrices."""
    if (upcycled := passed_on(checkpoint).upcycled) is None:
        return routed_scale("none", native=True)
    return routed_scale(upcycled.shared, native=upcycled.target != "moetool")


def entry_for(
    layouts: Mapping[int, LayerLayout], source: Source, *, method: str | None = None
) -> dict[str, object] | None:
    """The `quantization_config` for these layouts on top of what the source had; `None` if every layer is native."""
    merged = {**source.experts.layouts, **layouts}
    old = moetool_entry(source.checkpoint.config) or {}
    beside = {**quantized_beside(source.checkpoint.settings), **source.included}
    if not beside and all(layout.is_native for layout in merged.values()):
        return None
    kept = {key: old[key] for key in old if key not in ("layers", "quant_method", "format_version")}
    own: dict[str, object] = {} if method is None else {"method": method}
    if beside:
        own[BESIDE] = {name: form.spec for name, form in beside.items()}
    return format_entry(merged, more={**kept, "original_bytes": original_bytes(source), **own})


def original_bytes(source: Input) -> int:
    """Bytes of the weight files before anything was done to the model: what a ratio refers to."""
    entry = moetool_entry(source.checkpoint.config)
    recorded = whole_number(entry, "original_bytes") if entry else None
    return source.checkpoint.weight_bytes if recorded is None else recorded


def original_size(source: Source) -> str:
    """Original size that a ratio refers to, for people: "689.0 GB in FP8"."""
    return format_bytes(original_bytes(source)) + source.checkpoint.in_format
