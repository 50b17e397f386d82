"""Gemma 1: Llama with scaled embeddings, and norms whose weights are kept less one."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Gemma",
    model_types=("gemma",),
    reference="https://arxiv.org/abs/2403.08295",
    norm_offset=1.0,
    features=("scaled_embedding",),
    optional_features={"attention_bias": "attention_bias"},
)
