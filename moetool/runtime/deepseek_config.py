"""The config of DeepSeekMoE-16B (`model_type: deepseek`), which transformers 5 does not know.

It is registered while transformers is being imported, so it builds on nothing but what is complete by then; Llama's
config is not. The model class is registered when the first such config is made.
"""

from typing import Any, Self

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig


class DeepseekConfig(PreTrainedConfig):
    """The entries of the hub's `config.json`: Llama's, and those of the experts."""

    model_type = "deepseek"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012  # as Qwen2-MoE's experts ask for it

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None
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

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Every way to the model leads through its config."""
        from moetool.runtime.modules import deepseek

        deepseek.register(DeepseekConfig)
        return super().__new__(cls)

    def __post_init__(self, **kwargs: object) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)


AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig, exist_ok=True)
