"""What a finished stage says of sizes."""

import pytest

from moetool.cli.jobs import _size
from moetool.job.result import Sizes


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (Sizes(41_500_000, 24_900_000, 0.4), "41.5 MB → 24.9 MB (40.00% smaller)"),
        (Sizes(40_000_000, 160_000_000), "40.0 MB → 160.0 MB"),
        (
            Sizes(40_000_000, 44_000_000, -0.1, 46_000_000),
            "46.0 MB → 44.0 MB (10.00% larger than the 40.0 MB of the original model)",
        ),
        (Sizes(40_000_000, 40_000_000, 0.0, 10_000_000), "10.0 MB → 40.0 MB (as large as the original model)"),
    ],
)
def test_a_change_says_to_what_it_is_compared(sizes: Sizes, said: str) -> None:
    assert _size(sizes) == said
