"""Seed-OSS: Llama with biases on queries, keys and values."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Seed-OSS",
    model_types=("seed_oss",),
    reference="https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base",
    optional_features={"attention_bias": "qkv_bias", "attention_out_bias": "own_block", "mlp_bias": "mlp_bias"},
)
