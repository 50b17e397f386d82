"""What processes tell one another."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import moetool
from moetool.job.messages import from_bytes, to_bytes


@pytest.mark.parametrize(
    "said",
    [
        None,
        True,
        -3,
        0.1 + 0.2,
        math.inf,
        "wörter\0",
        b"",
        bytes(range(256)),
        [],
        ({"forward/0", "text"}, {"text": {"windows": "ab", "experts": 3, "none": None}}),
        {(1, "up"): [1.5], "2": 2, 2: (), None: {"tensor": 1, "list": {"dict": []}}},
    ],
)
def test_words_come_as_they_were(said: object) -> None:
    found = from_bytes(to_bytes(said))
    assert found == said
    assert type(found) is type(said)


def test_tensors_come_as_they_were() -> None:
    whole = torch.arange(24.0).view(4, 6)
    said = [
        (0, whole[:, 2:5]),
        (1, whole.T),
        (2, whole),  # all of one memory
        (3, torch.tensor(2.5, dtype=torch.float64)),
        (4, torch.zeros(0, 3, dtype=torch.int64)),
        (5, torch.tensor([1.5, math.nan], dtype=torch.bfloat16)),
        (6, torch.nn.Parameter(torch.ones(2, dtype=torch.uint8).bool().float())),
    ]
    found = from_bytes(to_bytes(said))
    assert isinstance(found, list)
    for (number, expected), (place, tensor) in zip(said, found, strict=True):
        assert place == number
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.nan_to_num(), expected.detach().nan_to_num())


@dataclass
class Ours:
    field: int = 1


@pytest.mark.parametrize("said", [Ours(), [Ours()], {"a": Ours()}, print, torch.float32])
def test_nothing_else_is_taken(said: object) -> None:
    with pytest.raises(TypeError, match="is no message between processes"):
        to_bytes(said)


def test_nothing_is_pickled_anywhere() -> None:
    """Also not by torch's collectives of objects. One file is written for transformers' Trainer, as it would do it."""
    package = Path(moetool.__file__).parent
    words = "import pickle", "torch.load(", "torch.save(", "broadcast_object", "gather_object", "scatter_object"
    found = [(path.name, word) for path in package.rglob("*.py") for word in words if word in path.read_text()]
    assert found == [("trainer.py", "torch.save(")]
