"""StarCoder 2."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="StarCoder2",
    model_types=("starcoder2",),
    reference="https://arxiv.org/abs/2402.19173",
    weights={"up": "c_fc.weight", "down": "c_proj.weight"},
    features=("ungated", "own_block"),
)
