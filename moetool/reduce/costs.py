"""Costs of measuring and merging experts, beyond the pass over the text."""

from moetool.architectures import MoEShape
from moetool.costs.building_blocks import ModelSize
from moetool.costs.calibration_cost import CalibrationCost
from moetool.numerics.work import Work


def tokens_in_layers(cost: CalibrationCost, size: ModelSize) -> int:
    """Number of calibration tokens times the number of MoE layers that each goes through."""
    return cost.samples * cost.length * size.moe_layers


def every_expert(cost: CalibrationCost, size: ModelSize, shape: MoEShape) -> Work:
    """Work of running every expert on every calibration token, routed to it or not."""
    numbers = tokens_in_layers(cost, size) * shape.experts
    return Work(
        products={"float32": numbers * shape.expert_parameters},
        moved=numbers * (24 * shape.intermediate + 12 * shape.hidden),
    )


def merging_work(size: ModelSize, shape: MoEShape, merged: int, *, align: bool) -> Work:
    """Sums of the matrices of so many experts of every layer; with `align` the inner products of their neurons, and the
    assignment."""
    each = Work(moved=20 * shape.expert_parameters)
    if align:
        pairs = shape.intermediate**2
        each += Work(products={"float32": shape.expert_parameters * shape.intermediate}, moved=400 * pairs)
    return each * (merged * size.moe_layers)
