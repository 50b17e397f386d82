"""Decoder layers, told by names of tensors."""

import pytest

from moetool.architectures.layers import decoder_layer


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.0.w1.weight", "model.layers.3"),
        ("transformer.h.12.attn.c_attn.weight", "transformer.h.12"),
        ("transformer.blocks.0.ffn.experts.mlp.w1", "transformer.blocks.0"),
        ("h.0.attn.c_attn.weight", "h.0"),
        ("model.language_model.layers.1.norm.weight", "model.language_model.layers.1"),
        ("model.embed_tokens.weight", ""),
        ("lm_head.weight", ""),
    ],
)
def test_the_layer_of_a_tensor(name: str, layer: str) -> None:
    assert decoder_layer(name) == layer
