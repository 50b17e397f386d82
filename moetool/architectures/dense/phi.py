"""Phi-1, Phi-1.5 and Phi-2."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Phi",
    model_types=("phi",),
    reference="https://arxiv.org/abs/2309.05463",
    weights={"up": "fc1.weight", "down": "fc2.weight"},
    features=("ungated", "own_block"),
)
