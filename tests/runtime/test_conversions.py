"""transformers' conversions of experts, as they are for moetool's tensors."""

from typing import Any

import pytest
import torch
from transformers.core_model_loading import MergeModulelist, SplitModulelist, Transpose

from moetool.runtime.conversions import fitting

NAME = "experts.*.w1.weight"


@pytest.fixture
def squeezing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' split of experts as it is in 5.17 to 5.22."""
    convert = SplitModulelist.convert

    def squeezed(self: Any, *given: Any, **options: Any) -> dict[str, Any]:
        return {name: tensor.squeeze() for name, tensor in convert(self, *given, **options).items()}

    monkeypatch.setattr(SplitModulelist, "convert", squeezed)


@pytest.mark.usefixtures("squeezing")
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (4, 5)])
def test_saved_experts_keep_dimensions_of_length_one(shape: tuple[int, ...]) -> None:
    experts = torch.randn(3, *shape)
    split = fitting(MergeModulelist(0)).reverse_op.convert({NAME: [experts]}, [NAME], [NAME])
    assert [*split] == [NAME.replace("*", str(expert)) for expert in range(3)]
    assert all(own.equal(expected) for own, expected in zip(split.values(), experts, strict=True))
    merge = fitting(MergeModulelist(0)).reverse_op.reverse_op
    merged = merge.convert({NAME: [*split.values()]}, [NAME], ["experts.gate_up_proj"])
    assert merged["experts.gate_up_proj"].equal(experts)


def test_other_operations_are_transformers_own() -> None:
    operation = Transpose(1, 2)
    assert fitting(operation) is operation
