"""Origins of a model's experts, and the record of a model that has others of them."""

from collections.abc import Mapping, Sequence

from moetool.checkpoint.manifest import ExpertOrigin, Provenance, manifest_of
from moetool.checkpoint.reader import Checkpoint
from moetool.job.writing import passed_on

Origins = tuple[ExpertOrigin | None, ...]


def expert_origins(checkpoint: Checkpoint, count: int) -> Origins:
    """By number, the dense model that each of `count` experts came from; `None` where nothing says so."""
    manifest = manifest_of(checkpoint.path)
    known = () if manifest is None else manifest.provenance.experts or _mixed(manifest.recipe, count)
    return known if len(known) == count else (None,) * count


def _mixed(recipe: Mapping[str, object], count: int) -> Origins:
    """The origins that the recipe of Branch-Train-MiX tells, which older manifests did not record expert by expert."""
    sources = recipe.get("source")
    if recipe.get("stage") != "branch-train-mix" or not isinstance(sources, list) or not sources:
        return ()
    names = [str(source["model"]) if isinstance(source, Mapping) else str(source) for source in sources]
    return tuple(ExpertOrigin(model=names[expert % len(names)]) for expert in range(count))


def with_experts(checkpoint: Checkpoint, origins: Origins, top_k: int, *, copies: bool = True) -> Provenance:
    """The record of what was made of a checkpoint and has experts of these `origins`, `top_k` of them per token.
    Without whole `copies` of an FFN the model cannot be un-merged."""
    upcycled = passed_on(checkpoint).upcycled
    if upcycled is not None:
        mixture = {**upcycled.mixture, "experts": len(origins), "top_k": top_k}
        upcycled = upcycled.model_copy(update={"mixture": mixture, "whole": upcycled.whole and copies})
    return Provenance(upcycled=upcycled, experts=origins if any(origins) else ())


def model_names(origins: Sequence[ExpertOrigin | None]) -> list[str | None]:
    """The names of the models, as the user gave them."""
    return [None if origin is None else origin.model for origin in origins]
