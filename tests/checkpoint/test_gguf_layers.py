"""Which layers do what, by the names of their tensors."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moetool.checkpoint.gguf_layers import kinds_of_layers, turns_of_layers
from moetool.checkpoint.gguf_metadata import GgufMetadata
from moetool.errors import InvalidInputError
from moetool.format.gguf.families import GGUF_FAMILIES

ATTENTION, STATE, ROUTER, NETWORK = "attn_q.weight", "ssm_in.weight", "ffn_gate_inp.weight", "ffn_up.weight"


def metadata(*layers: Sequence[str]) -> GgufMetadata:
    names = [f"blk.{index}.{name}" for index, held in enumerate(layers) for name in held]
    return GgufMetadata(Path("x.gguf"), GGUF_FAMILIES[0], {}, dict.fromkeys(names, ()), lambda _: torch.empty(0))


def test_layers_that_do_one_thing_only() -> None:
    found = metadata([STATE], [ROUTER], [ATTENTION], [NETWORK])
    assert kinds_of_layers(found, 4) == ["linear_attention", "moe", "full_attention", "mlp"]
    with pytest.raises(InvalidInputError, match=r"a layer \(0\) that is full_attention and mlp"):
        kinds_of_layers(metadata([ATTENTION, NETWORK]), 1)
    with pytest.raises(InvalidInputError, match=r"a layer \(1\) that is nothing"):
        kinds_of_layers(metadata([STATE], []), 2)


@pytest.mark.parametrize("has", ["010101", "000", "111", "001", "100", "0100", "0000100000001", "100100"])
def test_layers_that_take_turns(has: str) -> None:
    found = turns_of_layers(metadata(*([ATTENTION] if one == "1" else [] for one in has)), len(has))
    period, offset = found["attn_layer_period"], found["attn_layer_offset"]
    assert offset < period
    assert "".join(str(int(layer % period == offset)) for layer in range(len(has))) == has
    assert found["expert_layer_offset"] >= len(has)


@pytest.mark.parametrize("has", ["110", "011", "100101"])
def test_layers_that_take_no_turns_are_refused(has: str) -> None:
    with pytest.raises(InvalidInputError, match=r"layers that do not take turns \(ffn_gate_inp.weight\)"):
        turns_of_layers(metadata(*([ROUTER] if one == "1" else [] for one in has)), len(has))
