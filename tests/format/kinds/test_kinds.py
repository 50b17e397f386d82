"""The contract of every kind of custom module: read and written as one spec, refused by name, and true of its files."""

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from upcycled import interpolated, open_dense, save_dense, upcycled, with_adapters, write_upcycled

from moetool.architectures.dense import find_dense_architecture
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.parts import Converted
from moetool.errors import InvalidInputError
from moetool.format.entry import custom_entry
from moetool.format.families import architecture_of, dense_architecture_of, is_opaque
from moetool.format.kinds import CustomModule, custom_module, kinds
from moetool.format.kinds.base import PLACEHOLDER
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.format.marker import moetool_entry
from moetool.moefy.clusters import LayerPlan, Moefied
from moetool.runtime.building import check_sizes
from moetool.runtime.dense import DenseModel

FAMILIES = ("llama", "phi3", "gpt_neox")
ENTRIES: dict[str, dict[str, Any]] = {
    "mixture": {
        **{"experts": 4, "top_k": 2, "intermediate": 48, "layers": [0, 2], "shared": "none", "of": 3, "hidden": 32},
        **{"roles": ["gate", "up", "down"], "biases": []},
    },
    "adapter_experts": {"experts": 4, "top_k": 2, "layers": [0, 2], "width": 8, "scale": 1.5, "dropout": 0.0},
    "interpolated": {"experts": 4, "router_width": 8, "sparsity": 0.5, "channels": {"model.layers.0.mlp.up_proj": 3}},
    "neuron_experts": {
        **{"experts": 4, "keep": 0.5, "selector": "projection", "layers": [0, 2], "leads": ["gate", "up"]},
    },
}
NONSENSE: dict[str, dict[str, Any]] = {  # of every field that a kind may have, what is none of its values
    "mixture": {"top_k": 5, "intermediate": 0, "layers": [2, 0], "shared": "some", "of": 10**9, "hidden": -1,
                "roles": ["left"], "biases": 7},
    "adapter_experts": {"top_k": 0, "layers": [-1], "width": "8", "scale": math.nan, "dropout": 1.0},
    "interpolated": {"router_width": 0, "sparsity": 1.5, "channels": 7},
    "neuron_experts": {"keep": 0.01, "selector": "best", "layers": [1.5], "leads": ["down", "up"]},
}  # fmt: skip


def moefied(dense: DenseModel, selector: Any) -> Moefied:
    nothing = LayerPlan(torch.arange(dense.intermediate), torch.zeros(dense.intermediate))
    zeros = {"first": (4, dense.hidden), "second": (4, 4), "ranking": (4,), "up_price": (dense.intermediate,)}
    plan = replace(nothing, **{name: torch.zeros(shape) for name, shape in zeros.items()})
    first = "gate" if "gate" in dense.architecture.roles else "up"
    led = {"experts": dense.intermediate, "leads": (first, "up")} if selector == "projection" else {"experts": 4}
    spec = MoefiedSpec.from_config({"keep": 0.5, "selector": selector, "layers": (0, 2), **led})
    return Moefied(dense=dense, dtype=None, seed=0, spec=spec, layer_plan=lambda layer: plan)


# By kind, models that are made with it.
MADE: dict[str, tuple[Callable[[DenseModel], Converted], ...]] = {
    "mixture": tuple(
        lambda dense, shared=shared: upcycled(dense, "moetool", shared=shared, layers=(0, 2))  # type: ignore[misc]
        for shared in ("none", "half")
    ),
    "adapter_experts": (lambda dense: with_adapters(dense, layers=(0, 2)),),
    "interpolated": (interpolated,),
    "neuron_experts": tuple(
        lambda dense, selector=selector: moefied(dense, selector)  # type: ignore[misc]
        for selector in ("projection", "mlp", "oracle", "fixed")
    ),
}

every_kind = pytest.mark.parametrize("key", sorted(kinds()))


def config_of(spec: CustomModule) -> dict[str, Any]:
    return {"model_type": "llama", "quantization_config": custom_entry(spec)}


@every_kind
def test_what_is_written_is_what_is_read(key: str) -> None:
    kind = kinds()[key]
    spec = kind.from_config(ENTRIES[key])
    assert list(spec.to_config().items()) == [(name, ENTRIES[key][name]) for name in kind.model_fields]
    assert kind.from_config(spec.to_config()) == spec == custom_module(config_of(spec))
    assert kind.from_config({**ENTRIES[key], "of_tomorrow": 1}) == spec
    with pytest.raises(ValueError, match="frozen"):
        spec.experts = 5  # type: ignore[misc]


@every_kind
def test_nonsense_is_refused_by_the_name_of_its_field(key: str) -> None:
    kind = kinds()[key]
    changes = {"experts": 0, **NONSENSE[key]}
    assert changes.keys() == kind.model_fields.keys()
    for field, value in changes.items():
        with pytest.raises(InvalidInputError, match=rf"^quantization_config: {key}[.:].*{field}.* is .*\.$"):
            kind.from_config({**ENTRIES[key], field: value})
        missing = {name: other for name, other in ENTRIES[key].items() if name != field}
        if not kind.model_fields[field].is_required():
            continue
        with pytest.raises(InvalidInputError, match=rf"{key}\.{field} is missing\.$"):
            kind.from_config(missing)
    with pytest.raises(InvalidInputError, match=rf"{key} is \[\], but should be a valid dictionary"):
        kind.from_config([])


@every_kind
def test_it_says_what_it_is(key: str) -> None:
    spec = kinds()[key].from_config(ENTRIES[key])
    assert 0 < spec.at_work <= spec.experts
    assert all((spec.rule, spec.title, spec.what, spec.made))
    with pytest.raises(InvalidInputError, match=f"llama.*{spec.made[:12]}.*Start from the dense model"):
        dense_architecture_of(config_of(spec))
    if is_opaque(config_of(spec)):
        with pytest.raises(InvalidInputError, match=spec.what[:12]):
            architecture_of(config_of(spec))


@every_kind
def test_a_layer_that_the_model_does_not_have(key: str) -> None:
    spec, dense = kinds()[key].from_config(ENTRIES[key]), find_dense_architecture({"model_type": "llama"})
    spec.check(dense, 3, 32)
    spec.check(dense, None, None)
    if spec.among(2) != (0, 1):
        with pytest.raises(InvalidInputError, match=rf"{key}\.layers has \[2\], and the model has 2 layers"):
            spec.check(dense, 2, 32)


def test_each_layer_has_a_lead_where_projections_choose() -> None:
    entry = ENTRIES["neuron_experts"]
    for selector, leads, message in (("projection", ["up"], "1, and there should be 2"), ("mlp", ["up"] * 2, "be 0")):
        with pytest.raises(InvalidInputError, match=message):
            kinds()["neuron_experts"].from_config({**entry, "selector": selector, "leads": leads})
    older = {name: value for name, value in entry.items() if name != "leads"} | {"selector": "mlp"}
    assert kinds()["neuron_experts"].from_config(older).to_config() == older


def test_a_model_has_one_kind() -> None:
    entry = {"quant_method": "moetool", **ENTRIES}
    with pytest.raises(InvalidInputError, match=r"mixture.*: a model is one of these"):
        custom_module({"quantization_config": entry})
    assert custom_module({"quantization_config": {**entry, "quant_method": "awq"}}) is None


@every_kind
def test_its_module_is_found_by_name(key: str) -> None:
    assert callable(importlib.import_module(f"moetool.runtime.modules.{kinds()[key].name}").insert)


@every_kind
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_counts_are_those_of_a_model_that_was_made(key: str, family: str, tmp_path: Path) -> None:
    """Headers of the result: what was moved, what is new, and placeholders; and no others."""
    dense = open_dense(save_dense(tmp_path / "dense", family))
    before = {name: info.shape for name, info in dense.checkpoint.tensors.items()}
    for number, make in enumerate(MADE[key]):
        made = make(dense)
        written = Checkpoint.open(write_upcycled(tmp_path / str(number), made))
        check_sizes(written)  # what transformers builds has these names, too
        spec = custom_module(written.config)
        assert isinstance(spec, kinds()[key])
        assert (moetool_entry(written.config) or {})[key] == spec.to_config()
        shapes = {name: info.shape for name, info in written.tensors.items()}
        moved, new = spec.moved(dense.architecture, before), spec.new(dense.architecture, shapes)
        placeholders = {name for name, shape in shapes.items() if shape == PLACEHOLDER}
        assert shapes.keys() == {*moved.values()} | new | placeholders
        assert not new & ({*moved.values()} | placeholders)
        assert {to: before[name] for name, to in moved.items()} == {name: shapes[name] for name in moved.values()}
        counts, told = spec.counts(dense.architecture, shapes), made.parameters()
        extra = any(name.endswith(".multiplier") for name in new)  # which is in the file, and not in the model
        assert counts.total == sum(math.prod(shape) for shape in shapes.values()) - len(placeholders) - extra
        assert counts.added == sum(math.prod(shapes[name]) for name in new) - extra
        assert (counts.total, counts.active) == (told.total, told.active)
        assert (spec.masks(shapes) is None) == (key != "interpolated")
        masks = (spec.masks(shapes) or {}).values()
        assert {mask.tensor for mask in masks} == {name for name in new if name.endswith(".log_phi")}
        assert all(shapes[mask.tensor] == (spec.experts, mask.channels) and mask.is_trained for mask in masks)
        if is_opaque(written.config):
            assert counts.added == told.added == counts.total - dense.parameters
