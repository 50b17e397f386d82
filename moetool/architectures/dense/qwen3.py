"""Qwen3: Llama with norms on every head's queries and keys."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Qwen3",
    model_types=("qwen3",),
    reference="https://arxiv.org/abs/2505.09388",
    features=("head_norm",),
    optional_features={"attention_bias": "attention_bias"},
)
