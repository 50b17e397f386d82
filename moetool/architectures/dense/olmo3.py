"""OLMo 3: OLMo 2 with sliding windows in three of four layers."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="OLMo-3",
    model_types=("olmo3",),
    reference="https://arxiv.org/abs/2512.13961",
    features=("query_norm", "own_block"),
)
