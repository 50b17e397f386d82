"""Llama 4, refused."""

from moetool.architectures.base import Unsupported

UNSUPPORTED = Unsupported(
    name="Llama 4",
    model_types=("llama4", "llama4_text"),
    reason="its router weighs the experts' inputs and not their outputs, so the experts cannot share one product with "
    "the base",
)
