"""What each of several processes has of a text and of a layer."""

import pytest

from moetool.architectures import MoEShape
from moetool.calibration.peers import Owned, Peers, owners


class _Peer(Peers):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_work_goes_to_whom_has_least_to_do() -> None:
    assert owners([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert owners([1, 5, 2, 2], 2) == [1, 0, 1, 1]
    assert owners([3, 2], 4) == [0, 1]
    assert owners([], 3) == []
    costs = [float(7 * i % 11 + 1) for i in range(40)]
    shares = [
        sum(cost for cost, owner in zip(costs, owners(costs, 3), strict=True) if owner == own) for own in range(3)
    ]
    assert max(shares) - min(shares) <= max(costs)


@pytest.mark.parametrize(("count", "size"), [(7, 3), (2, 4), (0, 2), (8, 1)])
def test_parts_follow_each_other(count: int, size: int) -> None:
    parts = [_Peer(rank, size).part(count) for rank in range(size)]
    assert [own for part in parts for own in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_matrix_is_one_process_s() -> None:
    shape = MoEShape(experts=5, top_k=2, hidden=8, intermediate=16)
    each = [Owned(shape, _Peer(rank, 3)) for rank in range(3)]
    counts = [0, 0, 0]
    for role in shape.roles:
        for expert in range(shape.experts):
            [owner] = [rank for rank, owned in enumerate(each) if owned.has(role, expert)]
            assert owner == each[0].owner(role, expert)
            counts[owner] += 1
    assert counts == [5, 5, 5]
    assert all(owned.owner("gate", expert) == owned.owner("up", expert) for owned in each for expert in range(5))
    assert [owned.has("down", 5) for owned in each] == [True, False, False], "the shared expert is the first's"


def test_the_costliest_are_kept_apart() -> None:
    shape = MoEShape(experts=3, top_k=2, hidden=8, intermediate=16)
    owned = Owned(shape, _Peer(0, 2), {("down", 0): 10.0, ("up", 1): 6.0, ("gate", 1): 3.0, ("down", 2): 1.0})
    assert owned.owner("down", 0) == 0
    assert owned.owner("up", 1) == owned.owner("down", 2) == 1
    by_first = Owned.by_first(shape, _Peer(1, 2))
    assert not any(by_first.has(role, expert) for role in shape.roles for expert in range(3))
