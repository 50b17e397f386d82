"""OLMo 2: norms after each block, and on whole queries and keys."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="OLMo-2",
    model_types=("olmo2",),
    reference="https://arxiv.org/abs/2501.00656",
    features=("query_norm",),
    optional_features={"attention_bias": "attention_bias"},
)
