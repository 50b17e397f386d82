"""Added parameters as the DeRS paper's Tables S13 to S18 count them, from the sizes of the models alone."""

import pytest

from moetool.architectures import ROLES, MoEShape, Role
from moetool.format.layout import LayerLayout, native_layout
from moetool.representations import Representation
from moetool.representations.quantized import Quantized
from moetool.representations.sparse import Sparse

# Hidden size, FFN width and MoE layers of the upcycled models, of four experts each (Phi-2's FFN has two matrices).
STABLELM, QWEN = (2048, 5632, 12), (2048, 5504, 12)


def added(model: tuple[int, int, int], form: Representation | None) -> float:
    """Billions, cut to two digits as in the paper."""
    hidden, width, layers = model
    shape = MoEShape(experts=4, top_k=2, hidden=hidden, intermediate=width)
    layout = native_layout(shape) if form is None else LayerLayout.uniform(shape, form)
    return layers * layout.added_parameters() / 1e9


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (STABLELM, {16: 1.24, 8: 0.83, 4: 0.42, 2: 0.21, 1: 0.10}),
        (QWEN, {16: 1.22, 8: 0.81, 4: 0.41, 2: 0.20, 1: 0.10}),
    ],
)
def test_bits(model: tuple[int, int, int], published: dict[int, float]) -> None:
    for bits, billions in published.items():
        form = None if bits == 16 else Quantized(bits, 128)
        assert added(model, form) == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(
    ("drop", "billions"), [(0.2, 1.33), (0.4, 1.00), (0.6, 0.66), (0.8, 0.33), (0.9, 0.17), (0.99, 0.02)]
)
def test_drop_rates(drop: float, billions: float) -> None:
    assert added(STABLELM, Sparse(drop, 0)) == pytest.approx(billions, abs=0.006)


def test_roles_count_alike() -> None:
    shape = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
    form = Quantized(4, 16)
    each: dict[Role, float] = {role: form.counted_parameters(shape.matrix(role)) for role in ROLES}
    assert set(each.values()) == {32 * 48 / 4}
