"""Hunyuan (dense): Llama with norms on every head's queries and keys, after their rotation."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Hunyuan",
    model_types=("hunyuan_v1_dense",),
    reference="https://huggingface.co/tencent/Hunyuan-7B-Instruct",
    features=("own_block",),
)
