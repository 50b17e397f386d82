"""Which parameters of a test `make test` takes; `make test-all` takes all of them."""

from collections.abc import Iterable
from typing import Any

import pytest

# Dense families that differ in structure: gated, joined matrices, biases, norms behind, tied, one key for all heads.
DENSE_STRUCTURES = ("llama", "phi3-longrope", "gemma2", "gpt_neox", "gpt_bigcode", "falcon")
# MoE families: plain, biases, a shared expert and dense layers, joined matrices, grouped routers with latent attention
# and a prediction layer, linear attention, experts that give back what they are given.
MOE_STRUCTURES = ("mixtral", "phimoe", "qwen2_moe", "granitemoeshared", "deepseek_v3", "qwen3_next", "longcat_flash")


def sampled(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Every value as a parameter, a tuple as several; those that are not `kept` are marked `exhaustive`."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    own = {value if isinstance(value, tuple) else (value,) for value in kept}
    assert own <= set(rows), own - set(rows)
    return [pytest.param(*row, marks=() if row in own else pytest.mark.exhaustive) for row in rows]
