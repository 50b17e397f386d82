"""The kept shares of the D²-MoE paper's Table 12, to all four digits, from the numbers of Mixtral-8x7B."""

import pytest

from moetool.architectures import MoEShape
from moetool.compress.paper_counting import paper_rank
from moetool.errors import UsageError

MIXTRAL = MoEShape(experts=8, top_k=2, hidden=4096, intermediate=14336)
TOTAL = 46_702_792_704


@pytest.mark.parametrize(
    ("ratio", "performance", "throughput"),
    [(0.2, 68.05, 74.30), (0.4, 47.34, 53.58), (0.6, 26.62, 32.86), (0.7, 16.26, 22.54), (0.8, 5.93, 12.18)],
)
def test_table_12(ratio: float, performance: float, throughput: float) -> None:
    assert round(100 * paper_rank(ratio, 0.1, MIXTRAL, 32, TOTAL).kept, 2) == performance
    assert round(100 * paper_rank(ratio, 0.6, MIXTRAL, 32, TOTAL).kept, 2) == throughput


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="at most 0\\.856 is"):
        paper_rank(0.857, 0.1, MIXTRAL, 32, TOTAL)
    assert paper_rank(0.856, 0.1, MIXTRAL, 32, TOTAL).rank >= 1
