"""GPT-NeoX and Pythia."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="GPT-NeoX",
    model_types=("gpt_neox",),
    reference="https://arxiv.org/abs/2204.06745",
    layer="gpt_neox.layers.{layer}",
    weights={"up": "dense_h_to_4h.weight", "down": "dense_4h_to_h.weight"},
    features=("ungated", "own_block"),
)
