"""SmolLM3: Llama without rotary positions in every fourth layer."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="SmolLM3",
    model_types=("smollm3",),
    reference="https://huggingface.co/HuggingFaceTB/SmolLM3-3B",
    features=("own_block",),
)
