"""Checking a checkpoint file by file and tensor by tensor, alone or against one that it was made from."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from moetool.architectures import Architecture
from moetool.checkpoint.decoded import decoded, quantized_tensors
from moetool.checkpoint.digests import check_files
from moetool.checkpoint.gguf import gguf_in
from moetool.checkpoint.gguf_model import GgufModel
from moetool.checkpoint.identity import is_known_as, steps_since
from moetool.checkpoint.manifest import Manifest, Origin, manifest_of, read_manifest
from moetool.checkpoint.missing import is_base
from moetool.checkpoint.names import CONFIG, MANIFEST
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import local_path
from moetool.checkpoint.writer import is_finite
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.format.beside import quantizable, quantized_beside, weight_of
from moetool.format.entry import is_quantized_elsewhere
from moetool.format.families import is_opaque
from moetool.format.gguf.words import MODEL
from moetool.format.marker import moetool_entry
from moetool.job.job import DenseSource, Source, joined_names
from moetool.job.progress import SILENT, Progress, phase
from moetool.measure.expert_errors import NO_STAGES, ExpertErrors, Stages, effects_of
from moetool.measure.results import Comparison, Verification
from moetool.runtime.building import check_sizes


def verify_checkpoint(
    path: str | Path,
    against: str | Path | None = None,
    progress: Progress = SILENT,
    *,
    edited: bool = False,
    known: Stages = NO_STAGES,
) -> Verification:
    """Read every file and every tensor, and compare with a source if one is given.

    Always checked: headers, names and shapes against the config, that every number is finite, that codes and positions
    are such as are written, and that all files are those that were written, by the digests in the manifest (most packed
    codes have no other sign of damage). Files that were added are no errors but notes, and where documents were
    `edited`, such as a model card, so are these. Of an export's directory the GGUF file is read back. Of a base that
    `fisher-merge` wrote digests and numbers are checked.

    Against a source: that the manifest names it, as what the checkpoint or one of its sources was made from. If it is
    of the same family and shape: every tensor outside the experts bit for bit, unless it was trained in between or
    stored in few bits (`--include`), and how far each expert's matrices are from the originals (relative Frobenius
    norm), which the form that they are stored in must account for, unless they were trained (see `expert_errors`). What
    a step on the way does to them is an attribute of its stage, which is looked up among those `known`.

    Raises:
        UsageError: a GGUF file is to be compared with a source tensor by tensor.
        InvalidInputError: a file or the config cannot be used.
        VerificationError: something is wrong, named file by file and tensor by tensor.
    """
    if is_base(local_path(path)):
        return _verify_base(path, against, progress, edited=edited)
    exported = exported_gguf(path)
    file = gguf_in(local_path(path))
    if file is not None and against is not None:
        raise UsageError(
            f"Numbers of a GGUF file are rounded: compare what both predict, by moetool eval {file} --against "
            f"{against} --data TEXT."
        )
    if exported is not None and not (unread := GgufModel(exported)).is_read:
        return _verify_unread(path, unread, progress, edited=edited)
    checkpoint = Checkpoint.open(path)
    folder = checkpoint.path if exported is None else exported.parent
    manifest = manifest_of(folder)
    problems: list[str] = []
    notes: list[str] = []
    made, original = None, _Original()
    is_foreign = moetool_entry(checkpoint.config) is None and checkpoint.stored_as is not None
    is_packed = manifest is not None and (is_foreign or is_quantized_elsewhere(checkpoint.config))
    if is_packed:
        notes.append("its experts are packed for other engines: only digests tell whether they are what was written")
    else:
        made = _moe_source(checkpoint)
        check_sizes(checkpoint)
    if manifest is not None:
        found = check_files(folder, manifest, edited=edited)
        problems, notes = found.problems, [*notes, *found.notes]
    if against is not None:
        original = _compared(checkpoint, made, against, manifest, known, is_packed=is_packed)
        problems += original.problems
        notes += original.notes
    with phase(progress, "Verify", len(checkpoint.tensors), "tensors"):
        for name in checkpoint.tensors:
            tensor = checkpoint.read(name)
            if not is_finite(tensor):
                problems.append(f"{name} holds NaN or infinity")
            if name in original.same and original.shown is not None:
                if name not in original.shown.tensors:
                    problems.append(f"{name} is not in {against}")
                elif not torch.equal(tensor, original.shown.read(name)):
                    problems.append(f"{name} differs from {against}")
            progress.advance()
    if made is not None:
        problems += [problem for layer in made.experts.layouts for problem in made.experts.damage(layer)]
    _raise_for(path, problems)
    if (comparison := original.comparison) is not None and original.pair is not None:
        errors = ExpertErrors(*original.pair, effects_of(comparison.stages, known))
        errors.compare(progress)
        _raise_for(path, errors.problems)
        comparison = replace(comparison, relative_error=errors.relative, expert_error=errors.by_expert)
    return Verification(
        path=str(path),
        tensors=len(checkpoint.tensors),
        bytes=checkpoint.given_bytes,
        comparison=comparison,
        notes=notes,
    )


@dataclass(frozen=True)
class _Original:
    """What a checkpoint and a source that it is compared with have to have in common.

    Attributes:
        comparison: what is told of both, without errors of experts.
        pair: both as MoE models, if these are of one family and shape.
        shown: the source, with the tensors that are compared.
        same: names of the tensors that have to be those of the source, bit for bit.
        problems: of names, found before any tensor is read.
        notes: what cannot be told.
    """

    comparison: Comparison | None = None
    pair: tuple[Source, Source] | None = None
    shown: Checkpoint | None = None
    same: Set[str] = frozenset()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


def _compared(
    checkpoint: Checkpoint,
    made: Source | None,
    against: str | Path,
    manifest: Manifest | None,
    known: Stages,
    *,
    is_packed: bool,
) -> _Original:
    """Compare names and manifests of a checkpoint and a source: what of the source has to be in the checkpoint."""
    source = Checkpoint.open(against)
    problems, notes = list[str](), list[str]()
    is_itself = source.fingerprint() == checkpoint.fingerprint()
    steps = () if is_itself else _steps(manifest, source, known, notes)
    if manifest is not None and steps is None:  # how far their tensors differ would say nothing more
        return _Original(problems=[_another_source(manifest, against)])
    stages = [step.stage for step in steps or ()]
    # An export shows the matrices that codes stood for beside experts.
    pair = _comparable(made, _moe_source(source, as_matrices=not quantized_tensors(checkpoint)))
    if pair is None and not steps and not is_itself:
        problems.append(f"it is not made from {against}: family or shape differ, and no manifest says otherwise")
    shown, same, rounded = None, set[str](), set[str]()
    if is_packed and stages == ["compressed-tensors"]:
        shown = decoded(source)
        same = (checkpoint.tensors.keys() & shown.tensors.keys()) - checkpoint.forms.keys()
    if pair is not None:
        shown = pair[1].checkpoint
        lost = _passed(*pair) - checkpoint.tensors.keys()
        problems += [f"{name} is missing" for name in sorted(lost)]
        if "trains" not in effects_of(stages, known):
            made_anew = quantized_tensors(checkpoint) - quantized_tensors(source)
            rounded = checkpoint.tensors.keys() & _rounded(checkpoint, source, pair[1].architecture, steps or [])
            same = checkpoint.tensors.keys() - pair[0].experts.names - made_anew - rounded
    comparison = Comparison(against=str(against), stages=stages, same_tensors=len(same), rounded_tensors=len(rounded))
    return _Original(comparison, pair, shown, same, problems, notes)


def _verify_unread(path: str | Path, file: GgufModel, progress: Progress, *, edited: bool) -> Verification:
    """Check digests and numbers of an export of a family that moetool writes for llama.cpp and does not read."""
    problems: list[str] = []
    notes = ["moetool does not read this family's GGUF: digests and numbers were checked, names and shapes were not"]
    if (manifest := manifest_of(file.file.parent)) is not None:
        found = check_files(file.file.parent, manifest, edited=edited)
        problems, notes = found.problems, [*notes, *found.notes]
    with phase(progress, "Verify", len(file.tensors), "tensors"):
        for name in file.tensors:
            if not all(map(is_finite, file.matrices(name))):
                problems.append(f"{name} holds NaN or infinity")
            progress.advance()
    _raise_for(path, problems)
    return Verification(path=str(path), tensors=len(file.tensors), bytes=file.file.stat().st_size, notes=notes)


def _verify_base(path: str | Path, against: str | Path | None, progress: Progress, *, edited: bool) -> Verification:
    """Check digests and numbers of a base, and whether it was made of the experts of the model it is held against."""
    folder, comparison = local_path(path), None
    manifest = read_manifest(folder)
    found = check_files(folder, manifest, edited=edited)
    problems = found.problems
    if against is not None:
        if not is_known_as(Checkpoint.open(against), manifest.source_fingerprint):
            problems.append(_another_source(manifest, against))
        stages = [str(manifest.recipe["stage"])]
        comparison = Comparison(against=str(against), stages=stages, same_tensors=0, rounded_tensors=0)
    _raise_for(path, problems)  # what is not whole cannot be read
    files, tensors = sorted(folder.glob("*.safetensors")), 0
    with phase(progress, "Verify", len(files), "files"):
        for file in files:
            for name, tensor in load_file(file).items():
                tensors += 1
                if not is_finite(tensor):
                    problems.append(f"{name} in {file.name} holds NaN or infinity")
            progress.advance()
    _raise_for(path, problems)
    nbytes = sum(file.stat().st_size for file in files)
    return Verification(path=str(path), tensors=tensors, bytes=nbytes, comparison=comparison, notes=found.notes)


def verify_files(checkpoint: Checkpoint) -> list[str]:
    """Check names and shapes against the config, and files against their digests, without looking at numbers; documents
    may have been edited. Returns notes.

    Raises:
        InvalidInputError: the config cannot be used, or does not fit the files.
        VerificationError: a file is missing, or not what was written.
    """
    check_sizes(checkpoint)
    if (manifest := manifest_of(checkpoint.path)) is None:
        return []
    found = check_files(checkpoint.path, manifest, edited=True)
    _raise_for(checkpoint.source, found.problems)
    return found.notes


def exported_gguf(path: str | Path) -> Path | None:
    """Path of the GGUF file that `moetool export --format gguf` has written, given itself or by its directory; `None`
    for any other path."""
    file = gguf_in(local_path(path))
    return file if file is not None and file.name == MODEL and not (file.parent / CONFIG).exists() else None


def _raise_for(path: str | Path, problems: list[str]) -> None:
    if problems:
        more = f" … and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise VerificationError(f"{path}: " + "; ".join(problems[:5]) + more)


def _moe_source(checkpoint: Checkpoint, *, as_matrices: bool = False) -> Source | None:
    """The checkpoint as an MoE model, or `None` for one of a dense family or of moetool's own networks; if asked, with
    matrices in the place of codes beside its experts. Raises `InvalidInputError` for one that is neither."""
    if is_opaque(checkpoint.config):
        return None
    try:
        shown = decoded(checkpoint)  # or its headers say that it cannot be
        return Source.of(shown if as_matrices else checkpoint)
    except InvalidInputError:
        if DenseSource.if_known(checkpoint) is None:
            raise
        return None


def _comparable(made: Source | None, original: Source | None) -> tuple[Source, Source] | None:
    """Return both sources if they are of one family and shape, else `None`."""
    if made is None or original is None:
        return None
    is_same = made.architecture == original.architecture and made.experts.shape == original.experts.shape
    return (made, original) if is_same else None


def _another_source(manifest: Manifest, against: str | Path) -> str:
    """A sentence on a manifest that names other sources than the one that a checkpoint is compared with, which may be
    another model of the same name."""
    named = ", ".join(step.source for step in manifest.origins)
    return f"it was not made from {against}: its manifest has the fingerprint of other files ({named})"


def _passed(made: Source, original: Source) -> set[str]:
    """Names of the tensors of a source that have to be in what was made from it."""
    return set(original.checkpoint.tensors) - original.experts.names - joined_names(made)


def _rounded(
    checkpoint: Checkpoint, original: Checkpoint, architecture: Architecture, steps: Sequence[Origin]
) -> set[str]:
    """Weights beside the experts that are, or on the way from a source were, stored in codes that the source does not
    have (`--include`)."""
    modules_of = quantizable(architecture)
    asked = [(step.chosen or {}).get("include") for step in steps]
    kinds = {str(name).partition(":")[0] for names in asked if isinstance(names, list) for name in names}
    included = {module for kind in kinds for module in modules_of.get(kind, ())}
    modules = (included | quantized_beside(checkpoint.settings).keys()) - quantized_beside(original.settings).keys()
    return set(map(weight_of, modules))


def _steps(
    manifest: Manifest | None, original: Checkpoint, known: Stages, notes: list[str]
) -> tuple[Origin, ...] | None:
    """The steps from a source to what a manifest describes, the last first; empty if nothing tells; `None` if the
    manifest names other sources."""
    if manifest is None:
        notes.append(f"it has no {MANIFEST} that would say what it was made from")
        return ()
    if steps := steps_since(original, manifest):
        return steps
    origins = manifest.origins
    if (first := known.get(origins[-1].stage)) is not None and first.continues:
        notes.append(f"its manifest goes back to {origins[-1].source}, and does not say what that was made from")
        return ()
    return None
