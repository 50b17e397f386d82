"""Gemma 2 and 3 (text): norms around each block, local and global layers."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Gemma-2",
    model_types=("gemma2", "gemma3_text"),
    reference="https://arxiv.org/abs/2408.00118",
    norm_offset=1.0,
    features=("scaled_embedding", "sandwich_norm", "mixed_attention"),
    optional_features={"attention_bias": "attention_bias"},
)
