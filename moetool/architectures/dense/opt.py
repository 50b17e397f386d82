"""OPT."""

from moetool.architectures.dense.base import DenseArchitecture, Spread

DENSE = DenseArchitecture(
    name="OPT",
    model_types=("opt",),
    reference="https://arxiv.org/abs/2205.01068",
    layer="model.decoder.layers.{layer}",
    ffn="fc1",
    weights={"up": "fc1.weight", "down": "fc2.weight"},
    spread=Spread(exit="fc2", activation="activation_fn"),
    features=("ungated", "own_block", "spread"),
)
