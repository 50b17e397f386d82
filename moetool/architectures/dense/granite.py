"""Granite 3 (dense): Llama with constant multipliers."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Granite",
    model_types=("granite",),
    reference="https://huggingface.co/ibm-granite/granite-3.0-2b-base",
    features=("multipliers",),
    optional_features={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
