"""ERNIE 4.5 (dense): Llama whose rotary positions turn neighbouring numbers."""

from moetool.architectures.dense.base import DenseArchitecture

DENSE = DenseArchitecture(
    name="ERNIE-4.5",
    model_types=("ernie4_5",),
    reference="https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT",
    features=("own_block",),
)
