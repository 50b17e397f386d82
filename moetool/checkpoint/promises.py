"""Errors of weight files that do not hold what `config.json` promises: missing tensors, and those of another shape."""

from collections.abc import Iterable, Sequence

from moetool.errors import InvalidInputError


def lacking(source: object, missing: Sequence[str], held: Iterable[str], promise: str = "") -> InvalidInputError:
    """The error of files without tensors that `config.json` promises.

    Args:
        source: what the checkpoint is called.
        missing: names of those tensors.
        held: names of the tensors that the files have.
        promise: a sentence on what `config.json` says of them.
    """
    return InvalidInputError(
        f"{source} has no tensor {missing[0]}, which its config.json promises ({len(missing)} missing in all)."
        f"{promise} {what_to_do(missing, held)}"
    )


def check_shape(
    source: object, name: str, found: Sequence[int], promised: Sequence[int], more: str = "", *, by: str = "config.json"
) -> None:
    """Raise `InvalidInputError`, with `more` behind it, if a tensor has another shape in the files of `source` than
    `config.json` promises, or than follows from another tensor, which is then named with `by`."""
    if tuple(found) != tuple(promised):
        raise InvalidInputError(
            f"Tensor {name} of {source} has shape {list(found)}, {by} promises {list(promised)}.{more}"
        )


def what_to_do(missing: Iterable[str], held: Iterable[str]) -> str:
    """What to do about tensors that are missing: download them again; or where the files have one in a layer under a
    name with another beginning, and none with the usual one, rename them; or give the whole model, where its head is
    missing alone."""
    missing = list(missing)
    others = [(name, inside) for name in held if (inside := _from_layers_on(name))]
    begun = {name.removesuffix(inside) for name, inside in others}  # with two towers layers are called alike
    renamed = {inside: name for name, inside in others}
    found = [
        (name, inside)
        for name in missing
        if (inside := _from_layers_on(name)) in renamed and name.removesuffix(inside) not in begun
    ]
    if not found and all("head" in name.partition(".")[0] for name in missing):
        return "The files hold a model without its head, which predicts the next token: give the whole model."
    if not found:
        return "Its files are not whole, or another model's: download it again."
    (name, inside), *_ = found
    usual, theirs = name.removesuffix(inside), renamed[inside].removesuffix(inside)
    if not theirs:
        return (
            f"The files have {name} as {renamed[inside]}, as transformers saves a model without its head: give the "
            "whole model. Only if its head is its embedding (tie_word_embeddings), AutoModelForCausalLM makes it "
            f"whole: from_pretrained(...), then save_pretrained(...), which puts {usual!r} before it. Any other head "
            "would be random."
        )
    return (
        f"The files have {name} as {renamed[inside]}: rename it and the others, so that they begin with {usual!r}, not "
        f"{theirs!r}."
    )


def _from_layers_on(name: str) -> str:
    """The name of a tensor in a layer without what is before the list of layers: `layers.0.mlp.down_proj.weight`."""
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[index - 1 :]) if index else ""
