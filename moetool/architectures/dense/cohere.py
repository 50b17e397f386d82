"""Command R and R+: attention and feed-forward network beside each other, behind one LayerNorm."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="Cohere",
    model_types=("cohere", "cohere2"),
    reference="https://huggingface.co/CohereLabs/c4ai-command-r-v01",
    features=("own_block",),
)
