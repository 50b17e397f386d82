"""GLM-4: joined gate and up, rotary positions on half of each head, and in those of 0414 norms after each block."""

from moetool.architectures.base import GATED_JOINED
from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="GLM-4",
    model_types=("glm", "glm4"),
    reference="https://arxiv.org/abs/2406.12793",
    weights=GATED_JOINED,
    features=("own_block",),
)
