"""GPT-BigCode: SantaCoder and StarCoder."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="GPT-BigCode",
    model_types=("gpt_bigcode",),
    reference="https://arxiv.org/abs/2301.03988",
    layer="transformer.h.{layer}",
    weights={"up": "c_fc.weight", "down": "c_proj.weight"},
    features=("ungated", "own_block"),
)
