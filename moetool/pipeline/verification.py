"""Checking a checkpoint tensor by tensor, alone or against the one it was made from."""

from pathlib import Path
from typing import Any

import torch

from moetool.architectures import is_opaque
from moetool.checkpoint.files import file_sha256
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import MANIFEST, Checkpoint
from moetool.checkpoint.writer import is_finite
from moetool.errors import VerificationError
from moetool.integrations.building import check_sizes
from moetool.pipeline.job import Source, joined_names
from moetool.pipeline.progress import Progress, Silent, phase


def verify_checkpoint(
    path: str | Path, against: str | Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Read every tensor, and compare with the source if one is given.

    Always checked: headers, names and shapes against the config, that every number is finite, and that weight files
    are those that were written, by the digests in the manifest (packed codes have no other sign of damage). Against a
    source:
    same family and shape, the fingerprint in the manifest, every tensor outside the experts bit for bit, and how far
    each layer's experts are from the originals (relative Frobenius norm; reported, not judged).

    Raises:
        InvalidInputError: a file or the config cannot be used.
        VerificationError: something is wrong, named tensor by tensor.
    """
    progress = progress or Silent()
    checkpoint = Checkpoint.open(path)
    if is_opaque(checkpoint.config) and against is None:
        return _verify_alone(checkpoint, progress)
    made = Source.of(checkpoint)
    original = Source.open(against) if against is not None else None
    problems: list[str] = []
    tensors = made.checkpoint.tensors
    if original is not None:
        problems += _same_model(made, original)
    problems += _damaged_files(checkpoint)
    with phase(progress, "Verify", len(tensors)):
        for name in tensors:
            tensor = made.checkpoint.read(name)
            if not is_finite(tensor):
                problems.append(f"{name} holds NaN or infinity")
            if original is not None and name not in made.experts.names:
                if name not in original.checkpoint.tensors:
                    problems.append(f"{name} is not in {against}")
                elif not torch.equal(tensor, original.checkpoint.read(name)):
                    problems.append(f"{name} differs from {against}")
            progress.advance()
    result: dict[str, Any] = {"path": str(path), "tensors": len(tensors), "bytes": made.checkpoint.weight_bytes}
    if original is not None and not problems:
        result["against"] = str(against)
        result["relative_error"] = _expert_errors(made, original, progress)
    _raise_for(path, problems)
    return result


def _verify_alone(checkpoint: Checkpoint, progress: Progress) -> dict[str, Any]:
    """A checkpoint of which no more is known than its files."""
    check_sizes(checkpoint)
    problems = _damaged_files(checkpoint)
    with phase(progress, "Verify", len(checkpoint.tensors)):
        for name in checkpoint.tensors:
            if not is_finite(checkpoint.read(name)):
                problems.append(f"{name} holds NaN or infinity")
            progress.advance()
    _raise_for(checkpoint.source, problems)
    return {"path": checkpoint.source, "tensors": len(checkpoint.tensors), "bytes": checkpoint.weight_bytes}


def _raise_for(path: str | Path, problems: list[str]) -> None:
    if problems:
        more = f" … and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise VerificationError(f"{path}: " + "; ".join(problems[:5]) + more)


def _damaged_files(checkpoint: Checkpoint) -> list[str]:
    path = checkpoint.path
    if not (path / MANIFEST).exists():
        return []
    digests = read_manifest(path).files
    return [
        f"{file.name} is not the file that was written (its SHA-256 differs from the one in {MANIFEST})"
        for file in checkpoint.weight_files
        if file.name in digests and file_sha256(file) != digests[file.name]
    ]


def _same_model(made: Source, original: Source) -> list[str]:
    problems = []
    if made.architecture != original.architecture or made.experts.shape != original.experts.shape:
        return [f"it is not made from {original.checkpoint.path}: {made.experts.shape} is not {original.experts.shape}"]
    passed = original.checkpoint.tensors.keys() - original.experts.names - joined_names(made)
    problems += [f"{name} is missing" for name in sorted(passed - set(made.checkpoint.tensors))]
    if (made.checkpoint.path / MANIFEST).exists():
        manifest = read_manifest(made.checkpoint.path)
        chained = manifest.recipe.get("stage") not in (None, "d2moe", "decompose")
        if not chained and manifest.source_fingerprint != original.checkpoint.fingerprint():
            problems.append(f"its manifest names another source than {original.checkpoint.path}")
    return problems


def _expert_errors(made: Source, original: Source, progress: Progress) -> dict[str, dict[str, float]]:
    """Per layer and role: `‖W' − W‖ / ‖W‖` over all experts."""
    errors: dict[str, dict[str, float]] = {}
    with phase(progress, "Compare experts", len(made.experts.moe_layers)):
        for layer in made.experts.moe_layers:
            errors[str(layer)] = {}
            for role in made.experts.shape.roles:
                lost = total = 0.0
                for expert in range(made.experts.count(layer)):
                    before = original.experts.dense(layer, expert, role).double()
                    after = made.experts.dense(layer, expert, role).double()
                    lost += (after - before).square().sum().item()
                    total += before.square().sum().item()
                errors[str(layer)][role] = float(f"{(lost / total) ** 0.5 if total else 0.0:.4g}")
            progress.advance()
    return errors
