"""EXAONE 4: norms after each block and on every head, sliding windows in some layers."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="EXAONE-4",
    model_types=("exaone4",),
    reference="https://arxiv.org/abs/2507.11407",
    features=("own_block",),
)
