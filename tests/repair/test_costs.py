"""Operations of a repair, by its options."""

from pathlib import Path

import pytest

from moetool.costs.building_blocks import moe_size
from moetool.job.job import Source
from moetool.repair.costs import REPAIR, low_rank_numbers, repair_phases
from moetool.repair.options import RepairOptions


def products(source: Source, **options: int) -> float:
    """Multiplications of the training phase."""
    given = RepairOptions.model_validate({"to": "original", "sequence_length": 64, "batch_size": 4, **options})
    found = {phase.name: phase.work for phase in repair_phases(moe_size(source.experts), given, 10, 10, 10)}
    return sum(found[REPAIR].products.values())


def test_evaluations_on_held_out_windows_are_counted(tiny_mixtral: Path) -> None:
    source = Source.open(tiny_mixtral)
    few, many = (products(source, steps=60, held_out=16, evaluations=count) for count in (1, 9))
    longer = products(source, steps=60, held_out=32, evaluations=1)
    # 8 evaluations more of 32 windows, against twice as many windows in each of 2
    assert many - few == pytest.approx((longer - few) * 4)
    assert products(source, steps=2, held_out=16, evaluations=9) == products(
        source, steps=2, held_out=16, evaluations=2
    )


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((), 1), ((7,), 7), ((16, 300), 4800), ((40, 300), 16 * 340), ((3, 40, 300), 3 * 16 * 340), ((8, 1, 4), 32)],
)
def test_low_rank_numbers_of_any_shape(shape: tuple[int, ...], numbers: int) -> None:
    assert low_rank_numbers(shape) == numbers
