"""Phi-3, Phi-3.5 and Phi-4: Llama with joined projections."""

from moetool.architectures.base import GATED_JOINED
from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Phi-3",
    model_types=("phi3",),
    reference="https://arxiv.org/abs/2404.14219",
    weights=GATED_JOINED,
    joined_qkv="self_attn.qkv_proj.weight",
)
