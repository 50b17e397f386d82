"""Plan file: the forms that were chosen, which a user can read, edit and give back."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from reprlib import repr  # an alias of an alias of … is short as a file, and not as a message
from typing import Any

import yaml

from moetool.architectures import MoEShape, Role
from moetool.checkpoint.yaml_files import read_yaml
from moetool.errors import InvalidInputError
from moetool.format.layout import NO_BASE, LayerLayout
from moetool.job.options import INCLUDED, bits_of_included, names_of_included
from moetool.representations import Representation, parse_representation

_HEAD = """\
# What each expert is stored as. Edit it and give it to `moetool compress --method auto --plan FILE`.
# base: what a role's deltas are to, the same for gate and up, or `none`; rotation: a seed, where inputs are rotated;
# forms: for each the experts that have it. `moetool list representations` names them all.
# include: what is in 8 bits beside the experts, if anything: attention, embeddings, or both; attention:6 is in 6 bits.
# A layer that is `stored` stays in the few bits of a quantized input.
"""
_VERSION = 1
_STORED = "stored"


def plan_text(layouts: Mapping[int, LayerLayout], layers: Sequence[int], included: Sequence[str] = ()) -> str:
    """Write layouts by layer, and what is `included` beside the experts, as the text of a plan file, which `--plan`
    reads back and users may edit. Experts of those of the `layers` that have none stay as another tool has stored
    them."""
    entries = {
        layer: {str(role): _entry(layouts[layer], role) for role in layouts[layer].shape.roles}
        if layer in layouts
        else _STORED
        for layer in layers
    }
    content = {"format": _VERSION, **({"include": [*included]} if included else {}), "layers": entries}
    return _HEAD + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)


def _entry(layout: LayerLayout, role: Role) -> dict[str, object]:
    forms: dict[str, list[int]] = {}
    for expert, form in enumerate(layout.weights[role] or ()):
        forms.setdefault(form.spec, []).append(expert)
    rotation = {"rotation": layout.rotation[role]} if role in layout.rotation else {}
    return {"base": layout.base[role].spec if layout.has_base(role) else "none", **rotation, "forms": forms}


def read_plan(
    file: Path, shape: MoEShape, layers: tuple[int, ...], storable: Collection[int] = ()
) -> dict[int, LayerLayout]:
    """Inverse of `plan_text`, for a model with experts in these `layers`, of which those that are `storable` may stay
    as another tool has stored them.

    Raises:
        InvalidInputError: the file cannot be read, is not of that model, or says something that cannot be.
    """
    found = _content(file)["layers"]
    if wrong := [layer for layer in found if type(layer) is not int]:
        raise InvalidInputError(f"{file}: a layer is a number without quotes, not {repr(wrong[0])}.")
    if set(found) != set(layers):
        said, there = (", ".join(map(str, own)) for own in (found, layers))
        raise InvalidInputError(f"{file} is for layers {said}; the model has experts in {there}.")
    stored = [layer for layer in layers if found[layer] == _STORED]
    if wrong := [layer for layer in stored if layer not in storable]:
        raise InvalidInputError(
            f"{file}, layer {wrong[0]}: its experts are not in few bits that could stay as they are. Give it forms."
        )
    return {layer: _layout(f"{file}, layer {layer}", found[layer], shape) for layer in layers if layer not in stored}


def read_included(file: Path) -> tuple[str, ...]:
    """What a plan file quantizes beside the experts, as `--include` names it; nothing where it does not say.

    Raises:
        InvalidInputError: the file is no plan, or names what cannot be included.
    """
    told = _content(file).get("include", [])
    if not isinstance(told, list) or [name for name in told if not isinstance(name, str)]:
        raise InvalidInputError(f"{file}: `include` is a list of {' and '.join(INCLUDED)}, not {repr(told)}.")
    try:
        return names_of_included(bits_of_included(told))
    except ValueError as error:
        raise InvalidInputError(f"{file}, `include`: {error}.") from error


def _content(file: Path) -> dict[str, Any]:
    content = read_yaml(file, "the plan")
    keys = set(content) - {"include"} if isinstance(content, dict) else set()
    if not isinstance(content, dict) or keys != {"format", "layers"} or not isinstance(content["layers"], dict):
        raise InvalidInputError(
            f"{file} is not a plan: it needs `format: {_VERSION}` and `layers`, may have `include`, and nothing else."
        )
    if type(content["format"]) is not int or content["format"] != _VERSION:
        raise InvalidInputError(f"{file} has format {repr(content['format'])}; this moetool reads format {_VERSION}.")
    return content


def _layout(where: str, entries: object, shape: MoEShape) -> LayerLayout:
    if not isinstance(entries, dict) or set(entries) != set(shape.roles):
        raise InvalidInputError(f"{where}: needs {', '.join(shape.roles)}, each once.")
    weights: dict[Role, tuple[Representation, ...]] = {}
    base: dict[Role, Representation] = {}
    rotation: dict[Role, int] = {}
    for role in shape.roles:
        entry, here = entries[role], f"{where}, {role}"
        if not isinstance(entry, dict) or set(entry) - {"rotation"} != {"base", "forms"}:
            raise InvalidInputError(f"{here}: needs `base` and `forms`, and may have `rotation`.")
        base[role] = NO_BASE[role] if entry["base"] == "none" else _form(here, entry["base"])
        weights[role] = _forms(here, entry["forms"], shape.experts)
        for form in {base[role], *weights[role]}:
            _check(here, form, shape.matrix(role))
        if "rotation" in entry:
            if type(entry["rotation"]) is not int:
                raise InvalidInputError(f"{here}: a rotation is a seed, not {repr(entry['rotation'])}.")
            rotation[role] = entry["rotation"]
    try:
        return LayerLayout(shape, weights, shape.intermediate, base=base, rotation=rotation)
    except ValueError as error:
        raise InvalidInputError(f"{where}: {error}.") from error


def _check(where: str, form: Representation, matrix: tuple[int, int]) -> None:
    """Raise `InvalidInputError` for a form that one matrix `[out, in]` by itself cannot be brought into."""
    if form.shared_tensors(matrix):
        raise InvalidInputError(
            f"{where}: '{form.spec}' shares a factor among experts, and a plan chooses for each by itself."
        )
    if form.directions > min(matrix):
        raise InvalidInputError(
            f"{where}: '{form.spec}' has {form.directions} directions; a matrix of {matrix[0]} × {matrix[1]} has "
            f"{min(matrix)}."
        )


def _form(where: str, spec: object) -> Representation:
    if not isinstance(spec, str):
        raise InvalidInputError(f"{where}: a form is a name such as 'quantised:4:128', not {repr(spec)}.")
    try:
        return parse_representation(spec)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error


def _forms(where: str, entry: object, experts: int) -> tuple[Representation, ...]:
    if not isinstance(entry, dict):
        raise InvalidInputError(f"{where}: `forms` gives for each form the experts that have it, not {repr(entry)}.")
    found: dict[int, Representation] = {}
    for spec, own in entry.items():
        form = _form(where, spec)
        if not isinstance(own, list) or (wrong := [one for one in own if type(one) is not int]):
            given = wrong[0] if isinstance(own, list) else own
            raise InvalidInputError(f"{where}: '{form.spec}' takes a list of numbers of experts, not {repr(given)}.")
        for expert in own:
            if expert in found:
                raise InvalidInputError(f"{where}: expert {expert} has more than one form.")
            found[expert] = form
    if set(found) != set(range(experts)):
        raise InvalidInputError(f"{where}: `forms` must name each of the experts 0 to {experts - 1} once.")
    return tuple(found[expert] for expert in range(experts))
