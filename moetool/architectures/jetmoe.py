"""JetMoE, refused."""

from moetool.architectures.base import Unsupported

UNSUPPORTED = Unsupported(
    name="JetMoE",
    model_types=("jetmoe",),
    reason="its attention has experts too, and transformers holds all of them in modules that no other family has",
)
