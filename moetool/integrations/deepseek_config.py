"""The config of DeepSeekMoE-16B (`model_type: deepseek`), which transformers 5 does not know.

Its model class is registered when the first such config is made, not while transformers is being imported: the class
needs parts of transformers that may be half imported then.
"""

from typing import Any, Self

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.llama.configuration_llama import LlamaConfig


class DeepseekConfig(LlamaConfig):  # type: ignore[misc]
    """The entries of the hub's `config.json`."""

    model_type = "deepseek"
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Every way to the model leads through its config."""
        from moetool.modules import deepseek

        deepseek.register()
        return super().__new__(cls)


def register() -> None:
    """Make `AutoConfig` know it. Safe to call twice."""
    AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig, exist_ok=True)
