"""How a layer's experts are stored: the config entry, and the tensors and bytes that follow from it."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from moetool.architectures import ROLES, MoEShape
from moetool.errors import InvalidInputError
from moetool.format.layout import BASE_CHANNELS, NO_BASE, LayerLayout, delta_name, native_layout
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.representations.quantized import Quantized
from moetool.runtime.modules.experts import SharedBaseExperts

SHAPE = MoEShape(experts=3, top_k=2, hidden=8, intermediate=12)

LAYOUTS = {
    "uniform": LayerLayout.uniform(SHAPE, LowRank(2)),
    "rank 0": LayerLayout.uniform(SHAPE, LowRank(0)),
    "dense": LayerLayout.uniform(SHAPE, Dense()),
    "mixed": LayerLayout(
        SHAPE,
        {
            "gate": (LowRank(1), LowRank(0), Dense()),
            "up": (Dense(), LowRank(3), LowRank(2)),
            "down": (LowRank(4), Dense(), LowRank(0)),
        },
        12,
    ),
    "pruned": LayerLayout.uniform(SHAPE, LowRank(2), base_channels=9),
    "dynamic": LayerLayout(SHAPE, dict.fromkeys(("gate", "up", "down"), (LowRank(2),) * 3), 9, 4),
    "native down": LayerLayout(SHAPE, {"gate": (LowRank(1),) * 3, "up": (Dense(),) * 3, "down": None}, 12),
    "native gate and up": LayerLayout(SHAPE, {"gate": None, "up": None, "down": (LowRank(1),) * 3}, 10, 2),
    "rotated": LayerLayout(
        SHAPE, dict.fromkeys(ROLES, (Quantized(4, 4),) * 3), 12, base=NO_BASE, rotation={"gate": 3, "up": 3}
    ),
    "no base": LayerLayout.uniform(SHAPE, Quantized(4, 4), base=NO_BASE),
    "native": native_layout(SHAPE),
}


class Fused(nn.Module):
    """What `SharedBaseExperts` asks of the module it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(3, 24, 8, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.empty(3, 8, 12, dtype=torch.bfloat16))
        self.act_fn, self.config = nn.SiLU(), None


each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@each_layout
def test_config_round_trip(layout: LayerLayout) -> None:
    config = json.loads(json.dumps(layout.to_config()))
    assert LayerLayout.from_config(SHAPE, config) == layout


def test_config_form() -> None:
    assert LAYOUTS["dynamic"].to_config() == {
        "gate": ["low-rank:2"] * 3,
        "up": ["low-rank:2"] * 3,
        "down": ["low-rank:2"] * 3,
        "base_channels": 9,
        "dynamic_channels": 4,
    }
    assert LAYOUTS["native down"].to_config() == {"gate": ["low-rank:1"] * 3, "up": ["dense"] * 3, "down": None}


@each_layout
def test_names_shapes_and_numbers_are_those_of_the_module(layout: LayerLayout) -> None:
    module = SharedBaseExperts(Fused(), layout)
    stored = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    stored |= {name: tuple(tensor.shape) for name, tensor in module.named_buffers() if name.endswith(".codes")}
    deltas = {name: shape for name, shape in stored.items() if name.startswith("moetool.")}
    own = {name: entry.shape for name, entry in layout.own_tensors()}
    assert deltas == {name: shape for name, shape in own.items() if name != BASE_CHANNELS}
    assert (BASE_CHANNELS in own) == layout.is_pruned
    assert layout.stored_parameters() == sum(torch.Size(shape).numel() for shape in stored.values())
    if layout.has_base("gate"):
        assert stored["gate_up_proj"] == (1, 2 * layout.base_shape("gate")[0], 8)
        assert layout.base_shape("gate") == layout.base_shape("up")
    if layout.has_base("down"):
        assert stored["down_proj"] == (1, *layout.base_shape("down"))
    assert ("base_channels" in dict(module.named_buffers())) == layout.is_pruned


@each_layout
def test_meaning(layout: LayerLayout) -> None:
    assert layout.is_native == (layout is LAYOUTS["native"])
    assert layout.is_pruned == (layout.base_channels < 12)
    assert layout.is_baseless == (layout in (LAYOUTS["no base"], LAYOUTS["rotated"]))
    assert len(list(layout.deltas())) == 3 * sum(weights is not None for weights in layout.weights.values())


def test_bytes_of_the_plain_case_by_hand() -> None:
    base, factors = 3 * 8 * 12, 3 * 3 * 2 * (8 + 12)
    assert LAYOUTS["uniform"].stored_parameters() == base + factors
    assert LAYOUTS["pruned"].stored_parameters() == base * 9 // 12 + factors
    assert LAYOUTS["dense"].stored_parameters() == base + 3 * base
    assert LAYOUTS["native"].stored_parameters() == 3 * base


def test_no_base_takes_a_placeholder_per_role() -> None:
    layout = LAYOUTS["no base"]
    codes, scales = 8 * 12 // 2, 8 * 12 // 4 * 2
    assert layout.nbytes(torch.bfloat16) == 3 * (3 * (codes + scales) + 2)
    assert layout.to_config()["base"] == dict.fromkeys(ROLES, "low-rank:0")
    assert not [name for name, _ in layout.own_tensors() if ".base." in name]


@pytest.mark.parametrize(
    ("rotation", "form", "says"),
    [
        ({"gate": 1, "up": 2}, LowRank(1), "gate and up are given the same inputs"),
        ({"down": -1}, LowRank(1), r"a rotation's seed lies from 0 to 2\^63 - 1, not at -1"),
        ({"down": 1}, Dense(), "stored as it is cannot be rotated"),
    ],
)
def test_rotations_that_cannot_be(rotation: Any, form: Any, says: str) -> None:
    weights = dict.fromkeys(ROLES, (LowRank(1), LowRank(1), form))
    with pytest.raises(ValueError, match=says):
        LayerLayout(SHAPE, weights, 12, base=NO_BASE, rotation=rotation)


def test_delta_names() -> None:
    assert delta_name(7, "down", "u") == "moetool.7.down.u"
    assert [name for name, _ in LAYOUTS["mixed"].own_tensors()][:3] == [
        "moetool.0.gate.u",
        "moetool.0.gate.v",
        "moetool.2.gate.matrix",
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gate": None}, "gate and up are stored the same way"),
        ({"down": ["dense"]}, "down: 1 representations for 3 experts"),
        ({"base_channels": 0}, "0 base channels of 12"),
        ({"base_channels": 13}, "13 base channels of 12"),
        ({"dynamic_channels": -1}, "-1 dynamic channels of 12"),
        ({"dynamic_channels": 12}, "12 dynamic channels of 12"),
        ({"base_channels": 5, "dynamic_channels": 5}, "5 dynamic channels of 5"),
        ({"base_channels": "many"}, "base_channels must be a whole number, not .many"),
        ({"down": ["dense", "low-rank", "dense"]}, "takes one argument"),
        (
            {"gate": ["dense", "trellis:3:4", "dense"]},
            "gate cannot be stored as 'trellis:3:4': .* multiple of 8 rows, not 12",
        ),
        (
            {"base": dict.fromkeys(("gate", "up"), "trellis-weight:1:4")},
            "gate cannot be stored as 'trellis-weight:1:4'",
        ),
        ({"rotation": {"down": 1}}, "only routed experts on a quantized base, or on none, can be rotated"),
        ({"rotation": 3}, "rotation must be an object by role"),
        ({"spline": 3}, r"does not know: \['spline'\]"),
    ],
)
def test_entries_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    config = {**LAYOUTS["uniform"].to_config(), **changes}
    with pytest.raises(InvalidInputError, match=says):
        LayerLayout.from_config(SHAPE, config)
