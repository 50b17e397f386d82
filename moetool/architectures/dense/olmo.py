"""OLMo 1: Llama with LayerNorms that have no weights."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="OLMo",
    model_types=("olmo",),
    reference="https://arxiv.org/abs/2402.00838",
    features=("own_block",),
)
