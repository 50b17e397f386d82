"""`--layers`: which layers become MoE layers."""

import pytest

from moetool.convert.layers import parse_layers
from moetool.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count", "layers"),
    [
        ("all", 4, (0, 1, 2, 3)),
        ("all", 1, (0,)),
        ("every:1", 3, (0, 1, 2)),
        ("every:2", 6, (1, 3, 5)),
        ("every:2", 5, (1, 3)),
        ("every:3", 6, (2, 5)),
        ("every:5", 5, (4,)),
        ("0", 1, (0,)),
        ("0,4,8", 9, (0, 4, 8)),
        ("8, 0 ,4", 9, (0, 4, 8)),
        ("10,9,1,1,10", 11, (1, 9, 10)),
    ],
)
def test_layers(text: str, count: int, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, count) == layers


@pytest.mark.parametrize("text", ["", "ALL", "every", "every:", "every:0", "every:-2", "every:x", "0;1", "1-3", "0,,1"])
def test_what_is_no_selection(text: str) -> None:
    with pytest.raises(UsageError, match=r"give all, every:N or a list such as 0,4,8"):
        parse_layers(text, 4)


def test_layers_that_are_not_there() -> None:
    with pytest.raises(UsageError, match=r"--layers 0,4: the model has layers 0 to 3\."):
        parse_layers("0,4", 4)
    with pytest.raises(UsageError, match=r"--layers every:5: the model has only 4 layers\."):
        parse_layers("every:5", 4)
