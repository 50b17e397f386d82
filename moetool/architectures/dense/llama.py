"""Llama 1 to 3, and the many models that share its layers."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Llama",
    model_types=("llama",),
    reference="https://arxiv.org/abs/2407.21783",
    optional_features={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
