"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Qwen2",
    model_types=("qwen2",),
    reference="https://arxiv.org/abs/2407.10671",
    features=("qkv_bias",),
)
