"""Falcon."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Falcon",
    model_types=("falcon",),
    reference="https://arxiv.org/abs/2311.16867",
    layer="transformer.h.{layer}",
    weights={"up": "dense_h_to_4h.weight", "down": "dense_4h_to_h.weight"},
    returns_tuple=True,
    features=("ungated", "own_block"),
)
