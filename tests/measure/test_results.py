"""What measurements tell: typed, frozen, and printed in the order of docs/json.md."""

from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from moetool.job.result import Keyed, Printed
from moetool.measure.analysis import analyse
from moetool.measure.inspected import (
    Analysis,
    Energies,
    LayerAnalysis,
    MaskedLayer,
    Masks,
    MoELayer,
    RoleAnalysis,
    SharedBase,
    Similarity,
    StoredLayers,
)
from moetool.measure.inspection import inspect_checkpoint
from moetool.measure.perplexity import perplexity
from moetool.measure.results import Comparison, Verification
from moetool.measure.routing import routing
from moetool.measure.verification import verify_checkpoint


@pytest.mark.parametrize("measure", [analyse, inspect_checkpoint, perplexity, routing, verify_checkpoint])
def test_measurements_are_typed(measure: Callable[..., Any]) -> None:
    told = get_type_hints(measure)["return"]
    assert issubclass(told, Printed)
    assert told.__dataclass_params__.frozen


def test_a_layer_has_its_roles_beside_what_its_stage_said() -> None:
    base = SharedBase(40, 8, Keyed({"gate": ["low-rank:2", "dense"], "up": "native"}))
    layer = MoELayer(layer=1, representation="shared-base", stored_parameters=9, base=base, said=Keyed(tokens=[3, 1]))
    assert list(layer.to_json().items()) == [
        ("layer", 1),
        ("representation", "shared-base"),
        ("stored_parameters", 9),
        ("base_channels", 40),
        ("dynamic_channels", 8),
        ("gate", ["low-rank:2", "dense"]),
        ("up", "native"),
        ("tokens", [3, 1]),
    ]
    custom = StoredLayers(moe=[MoELayer(layer=1, representation="native")])
    assert custom.to_json() == {"moe": [{"layer": 1, "representation": "native"}]}


def test_masks() -> None:
    masks = Masks([MaskedLayer("a", "masks", 4, 0.5, 1.0)], 0.5, 1.0, [[1.0, 0.0], [0.0, 1.0]])
    assert list(masks.to_json()) == ["moe", "mean_density", "union_density", "overlap"]


def test_undefined_numbers_are_null() -> None:
    similarity = Similarity([[None]], None, None, None)
    role = RoleAnalysis(
        base="mean", sensitivity=None, cka=similarity, cka_v=None, cka_u=None, energy=Energies(None, [1.0], None, [0])
    )
    layer = LayerAnalysis(layer=2, sensitivity=None, token_share=None, roles=Keyed(up=role))
    assert Analysis(shares=[10], layers=[layer], notes=[]).to_json()["layers"] == [
        {
            "layer": 2,
            "sensitivity": None,
            "token_share": None,
            "up": {
                "base": "mean",
                "sensitivity": None,
                "cka": {"matrix": [[None]], "mean": None, "min": None, "max": None},
                "cka_v": None,
                "cka_u": None,
                "energy": {"experts": None, "base": [1.0], "delta": None, "zero_deltas": [0]},
            },
        }
    ]


def test_a_comparison_stands_before_the_notes() -> None:
    comparison = Comparison(against="a", stages=[], same_tensors=3, relative_error={0: {"up": 0.5}})
    shown = Verification(path="b", tensors=4, bytes=8, comparison=comparison, notes=[]).to_json()
    assert list(shown) == ["path", "tensors", "bytes", "against", "stages", "same_tensors", "relative_error", "notes"]
    assert shown["relative_error"] == {"0": {"up": 0.5}}
    assert list(Verification(path="b", tensors=4, bytes=8, notes=[]).to_json()) == ["path", "tensors", "bytes", "notes"]
