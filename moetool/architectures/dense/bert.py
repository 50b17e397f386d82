"""BERT, an encoder."""

from moetool.architectures.dense.base import DenseArchitecture, Spread

DENSE = DenseArchitecture(
    name="BERT",
    model_types=("bert",),
    reference="https://arxiv.org/abs/1810.04805",
    layer="bert.encoder.layer.{layer}",
    ffn="intermediate",
    weights={"up": "intermediate.dense.weight", "down": "output.dense.weight"},
    spread=Spread(exit="output.dense"),
    is_encoder=True,
    unused=("bert.pooler.", "cls.seq_relationship."),
    features=("ungated", "own_block", "spread"),
)
