"""Mistral: Llama with, in its first version, sliding-window attention."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Mistral",
    model_types=("mistral",),
    reference="https://arxiv.org/abs/2310.06825",
)
