"""DeepSeekMoE-16B (`model_type: deepseek`) for transformers 5, which has no class for it and cannot run its own code.

Llama's attention and norms, fine-grained experts with a softmax router, and shared experts beside them
(arXiv:2401.06066). Experts and router compute as Qwen2-MoE's, whose layout on disk the hub's checkpoint has, too.
"""

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeMLP, Qwen2MoeTopKRouter
from transformers.utils.output_capturing import OutputRecorder


class DeepseekMoE(nn.Module):
    """Routed experts plus shared experts, which every token passes."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate, self.experts = Qwen2MoeTopKRouter(config), Qwen2MoeExperts(config)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = Qwen2MoeMLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Sum routed and shared experts for hidden states `[batch, length, hidden]`, in the same shape."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(flat)
        routed = self.experts(flat, index, weights).view_as(hidden_states)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden_states)


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, with experts from `first_k_dense_replace` on."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if layer_idx >= config.first_k_dense_replace and layer_idx % config.moe_layer_freq == 0:
            self.mlp = DeepseekMoE(config)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """Attributes by which transformers loads, shards and traces DeepSeekMoE models."""

    # transformers looks for this in a class's source, and keeps what it found: of Llama's, which are above these, no.
    _can_set_experts_implementation_cached_value = True
    _no_split_modules = ["DeepseekDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen2MoeTopKRouter, index=0),
        "hidden_states": DeepseekDecoderLayer,
        "attentions": LlamaAttention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Qwen2MoeExperts, Qwen2MoeTopKRouter)):
            for parameter in module.parameters():
                parameter.data.normal_(0, self.config.initializer_range)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """Decoder of DeepSeekMoE (arXiv:2401.06066): embeddings, layers and final norm."""

    def __init__(self, config: PreTrainedConfig) -> None:
        # Not LlamaModel's: a Llama inside could not be told which implementation of the experts to use.
        DeepseekPreTrainedModel.__init__(self, config)  # type: ignore[call-arg]
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([DeepseekDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):
    """DeepSeekMoE's language model: the decoder and a head that predicts the next token."""

    def __init__(self, config: PreTrainedConfig) -> None:
        DeepseekPreTrainedModel.__init__(self, config)  # type: ignore[call-arg]
        self.model, self.vocab_size = DeepseekModel(config), config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register(config: type[PreTrainedConfig]) -> None:
    """Make the Auto classes know the model by its config. Safe to call twice."""
    for kind in (DeepseekPreTrainedModel, DeepseekModel, DeepseekForCausalLM):
        kind.config_class = config
    AutoModel.register(config, DeepseekModel, exist_ok=True)
    AutoModelForCausalLM.register(config, DeepseekForCausalLM, exist_ok=True)
    layout = get_checkpoint_conversion_mapping("qwen2_moe")
    register_checkpoint_conversion_mapping(config.model_type, layout, overwrite=True)
