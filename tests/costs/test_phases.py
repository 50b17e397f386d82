"""What jobs are made of grows as the maths says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from moetool.architectures import MoEShape
from moetool.costs.building_blocks import (
    ModelSize,
    calibration_backward,
    calibration_forward,
    factor_grams,
    fisher,
    head_gradients,
    input_grams,
    loading,
    merging,
    weights_again,
    writing,
)
from moetool.costs.calibration_cost import CalibrationCost
from moetool.costs.coefficients import COEFFICIENTS
from moetool.costs.machine import Machine
from moetool.costs.matrix_work import EIGENVALUES, factorize, spectrum, tried
from moetool.costs.phases import Phase, encoding_phases, factor_phases, gradient_phases, menu_phases
from moetool.format.layout import LayerLayout
from moetool.numerics.work import Work, altogether
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.representations.quantized import Quantized
from moetool.representations.trellis import Trellis
from moetool.representations.work import feeding_back

SHAPE = MoEShape(experts=8, top_k=2, hidden=64, intermediate=192)
OUTSIDE = 4 * 64 * 64


def model(layers: int) -> ModelSize:
    own, active = SHAPE.experts * SHAPE.expert_parameters, SHAPE.top_k * SHAPE.expert_parameters
    numbers = layers * (OUTSIDE + own)
    return ModelSize(layers, 64, 1000, numbers, layers * (OUTSIDE + active), 2 * numbers, 30 * layers, 4, layers, SHAPE)


def text(samples: int, gradients: int = 0, itemsize: int = 4) -> CalibrationCost:
    return CalibrationCost(samples, 1024, itemsize, gradient_samples=gradients)


def seconds(machine: Machine, phases: Sequence[Phase]) -> float:
    return machine.seconds(altogether(phase.work for phase in phases))


BLOCKS: list[Callable[[CalibrationCost, ModelSize], Work]] = [
    lambda cost, size: calibration_forward(cost, size),
    calibration_backward,
    fisher,
    factor_grams,
    input_grams,
    head_gradients,
]


@pytest.mark.parametrize("block", BLOCKS)
def test_linear_in_windows(block: Callable[[CalibrationCost, ModelSize], Work], measured_machine: Machine) -> None:
    """But for the weights, which are read once, however many windows there are."""
    took = [measured_machine.seconds(block(text(samples), model(4))) for samples in (8, 16, 32)]
    assert took[2] - took[1] == pytest.approx(2 * (took[1] - took[0]))
    assert took[0] < took[1]


@pytest.mark.parametrize("block", BLOCKS[:-1])
def test_linear_in_layers(block: Callable[[CalibrationCost, ModelSize], Work], measured_machine: Machine) -> None:
    """But for what is before the first and after the last."""
    took = [measured_machine.seconds(block(text(8), model(layers))) for layers in (2, 4, 8)]
    assert took[2] - took[1] == pytest.approx(2 * (took[1] - took[0]))
    assert took[0] < took[1]


def test_a_forward_multiplies_every_token_by_what_is_active() -> None:
    size, cost = model(4), text(16)
    products = calibration_forward(cost, size).products
    attention = 4 * 1024 * 64
    assert products == {"float32": pytest.approx(COEFFICIENTS.narrow * 16 * 1024 * (size.active + attention))}
    assert set(calibration_forward(text(16, itemsize=2), size).products) == {"bfloat16"}
    assert loading(size).read == size.nbytes


def test_gradients_are_of_some_windows_and_grams_of_all() -> None:
    size = model(4)
    few, whole = (factor_phases(text(32, few), size, size.nbytes // 2, gradients=True) for few in (8, 32))
    assert (
        [phase.name for phase in few] == [phase.name for phase in whole] == ["Forward", "Backward", "Encode and write"]
    )
    assert few[0] == gradient_phases(text(8), size, Work())[0]
    assert few[1].work.moved < whole[1].work.moved
    assert few[2] == whole[2]
    without = factor_phases(text(32), size, size.nbytes // 2, gradients=False)
    assert [phase.name for phase in without] == ["Forward", "Encode and write"]
    plain = factor_phases(None, size, size.nbytes // 2, gradients=False)
    assert [phase.name for phase in plain] == ["Factorize", "Encode and write"]


def test_outputs_that_count_together_cost_products_where_spectra_and_factors_are_made() -> None:
    size = model(4)
    plain, linked = (
        factor_phases(text(32, 8), size, size.nbytes // 2, gradients=True, linked=linked) for linked in (False, True)
    )
    assert plain[0] == linked[0]
    for one, other in zip(plain[1:], linked[1:], strict=True):
        assert other.work.products["float32"] > one.work.products["float32"]
        assert sum(other.work.cholesky.values()) > sum(one.work.cholesky.values())
    assert linked[1].work.products["float64"] > plain[1].work.products["float64"]


def test_one_eigen_decomposition_per_matrix() -> None:
    size = model(3)
    measure = factor_phases(text(8), size, size.nbytes // 2, gradients=False)[0].work
    assert measure.eigen == {64: pytest.approx(3 * 8 * 3 * EIGENVALUES)}
    assert factorize((192, 64), 16).cholesky == spectrum((192, 64)).cholesky == {64: 1.0}
    assert not factorize((64, 192), 16, whitened=False).cholesky


def test_codes_that_make_good_for_each_other_take_longer(measured_machine: Machine) -> None:
    form, matrix = Quantized(4, 64), (192, 64)
    plain, fed_back = form.work(matrix), form.work(matrix, fed_back=True)
    assert measured_machine.seconds(fed_back) == pytest.approx(
        measured_machine.seconds(plain) + measured_machine.seconds(feeding_back(matrix))
    )
    one = Quantized(1, 64).work(matrix)
    assert one.moved < plain.moved


def test_a_menu_is_measured_and_then_encoded() -> None:
    size = model(2)
    forms = {role: [LowRank(0), Quantized(2, 64), Quantized(4, 64)] for role in SHAPE.roles}
    base = dict.fromkeys(SHAPE.roles, Quantized(2, 64))
    phases, longer = (menu_phases(text(8, few), size, size.nbytes // 4, [(forms, base)]) for few in (8, 4))
    assert [phase.name for phase in phases] == ["Forward", "Backward", "Encode and write"]
    assert phases[1].work.moved > phases[2].work.moved
    assert longer[1].work.moved < phases[1].work.moved
    assert longer[2] == phases[2]


def test_every_storage_scheme_is_measured(measured_machine: Machine) -> None:
    size, matrix = model(2), SHAPE.matrix("gate")
    forms = {role: [LowRank(0), Quantized(2, 64), Quantized(4, 64)] for role in SHAPE.roles}
    base = dict.fromkeys(SHAPE.roles, Quantized(2, 64))
    one, two = (menu_phases(text(8), size, size.nbytes // 4, [(forms, base)] * count) for count in (1, 2))
    added = two[1].work + one[1].work * -1
    each = altogether(
        tried(forms[role], SHAPE.matrix(role)) * 16 + base[role].work(SHAPE.matrix(role)) * 2 for role in SHAPE.roles
    )
    assert added.moved == pytest.approx(each.moved)
    assert added.products["float32"] == pytest.approx(each.products["float32"])
    assert (one[0], one[2]) == (two[0], two[2])
    assert not tried([Quantized(2, 64)], matrix).eigen  # no directions are looked for
    assert tried([Trellis(4, 64)], matrix).moved > 2 * tried([Trellis(2, 64)], matrix).moved


def test_every_delta_is_encoded_once() -> None:
    size = model(2)
    layouts = {layer: LayerLayout.uniform(SHAPE, Quantized(4, 64)) for layer in range(2)}
    [encoding] = encoding_phases(None, size, layouts, 1000)
    each = altogether(Quantized(4, 64).work(SHAPE.matrix(role)) for role in SHAPE.roles)
    rest = writing(size.nbytes, 1000, size.tensors + 2 * 48)
    assert encoding.work == 16 * each + merging(size) + rest
    on_text = encoding_phases(text(4), size, layouts, 1000)[0].work
    assert on_text.calls > encoding.work.calls
    plain = {layer: LayerLayout.uniform(SHAPE, Dense()) for layer in range(2)}
    assert encoding_phases(None, size, plain, 1000)[0].work.moved < encoding.work.moved


def test_what_is_done_again_where_experts_come_in_sets() -> None:
    """Layers run without experts to note what these are given and to go on with what they give, and experts for what is
    common to them, for their own second moments, and for their gradients, each time from the disk."""
    size, cost, tokens = model(4), text(16), 16 * 1024
    sets = replace(size, in_sets=True)
    around = 4 * (OUTSIDE + 1024 * 64)
    experts = 4 * SHAPE.top_k * SHAPE.expert_parameters
    weights = 2 * 4 * SHAPE.experts * SHAPE.expert_parameters
    noted = 4 * 4 * tokens * 64
    means = 2 * (SHAPE.hidden**2 + SHAPE.top_k * SHAPE.intermediate**2)

    def again(block: Callable[[CalibrationCost, ModelSize], Work]) -> Work:
        return block(cost, sets) + block(cost, size) * -1

    for block, products, read in [
        (calibration_forward, around, 2 * noted),
        (partial(calibration_forward, measures=True), 0, noted),
        (calibration_backward, 2 * around + experts, 4 * noted + weights),
        (factor_grams, experts, weights),
        (input_grams, experts + means, weights),
        (fisher, 0, weights),  # of the experts that are merged
    ]:
        more = again(block)
        assert more.products.get("float32", 0) == pytest.approx(COEFFICIENTS.narrow * tokens * products, abs=10)
        assert more.read == pytest.approx(read)
    assert again(factor_grams).products["float64"] > 0
    assert "float64" not in input_grams(cost, sets).products
    assert weights_again(sets).read == pytest.approx(weights)
    assert weights_again(size) == Work()


def test_memory_for_fewer_experts_takes_longer(measured_machine: Machine) -> None:
    size = model(2)
    forms = {role: [LowRank(0), Quantized(4, 64)] for role in SHAPE.roles}

    def phases(size: ModelSize) -> list[Phase]:
        menu = menu_phases(text(8, 8), size, size.nbytes // 4, [(forms, {})])
        return [*factor_phases(text(8, 8), size, size.nbytes // 2, gradients=True), *menu]

    for whole, sets in zip(phases(size), phases(replace(size, in_sets=True)), strict=True):
        assert measured_machine.seconds(sets.work) > measured_machine.seconds(whole.work)


def test_phases_sum_to_the_whole(measured_machine: Machine) -> None:
    size = model(2)
    phases = factor_phases(text(8), size, size.nbytes // 2, gradients=True)
    each = [measured_machine.seconds(phase.work) for phase in phases]
    assert sum(each) == pytest.approx(seconds(measured_machine, phases))
