"""FLOPs and bytes read per token, counted from a model's modules.

FLOPs are two per number that meets an input in a product: matrices, factors, stored elements, routers, the language
model's head, and attention's two products with what is cached. Norms, activations and unpacking are not counted.

Bytes are those that have to be read at batch 1, at least: the weights that a token uses as they are stored, norms and
biases, one row of every embedding, and the cache. Of routed experts it is the top-k, where they differ in size k of the
average one; where the router also chooses experts without matrices (LongCat-Flash), a token counts as if it chose all
alike. Channels of a base that a batch skips (semi-dynamic pruning) are read and multiplied.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from moetool.format.layout import LayerLayout
from moetool.representations.base import Stored
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.fused import identities
from moetool.runtime.modules.insertion import experts_per_token, is_placeholder
from moetool.runtime.modules.led_neurons import LedNeurons
from moetool.runtime.modules.neuron_experts import NeuronExperts
from moetool.runtime.modules.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedModule
from moetool.runtime.modules.shared_expert import SharedExpertOnBase
from moetool.runtime.modules.simoe import InterpolatedLinear
from moetool.runtime.modules.simoe_mixing import Interpolation
from moetool.runtime.timing import keeps_last

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Cost(NamedTuple):
    """Cost of one token: multiplications, and bytes of weights that are read."""

    multiplications: Fraction = Fraction(0)
    nbytes: Fraction = Fraction(0)

    def times(self, factor: int | Fraction) -> "Cost":
        """Scale the cost of one token to that of `factor` tokens."""
        return Cost(self.multiplications * factor, self.nbytes * factor)


def total(costs: Iterable[Cost]) -> Cost:
    """Sum the multiplications and bytes of several costs."""
    multiplications, nbytes = zip(Cost(), *costs, strict=True)
    return Cost(sum(multiplications, Fraction(0)), sum(nbytes, Fraction(0)))


@dataclass(frozen=True)
class Attention:
    """Cost of attention in one layer.

    Attributes:
        multiplications: of a token and one key that it sees.
        nbytes: of the cache, by key.
        window: how many keys a token sees at most.
        expansion: multiplications by which every new token makes a key and its value of the latent that is cached.
    """

    multiplications: int
    nbytes: int
    window: int | None = None
    expansion: int = 0

    def keys(self, context: int) -> int:
        """Number of keys that a token sees in a context of so many tokens, itself among them."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Costs:
    """Costs of one model, from which those of a prompt and of a new token are summed.

    Attributes:
        body: without its head, per token.
        head: what makes logits of a hidden state.
        attention: of every layer.
        is_causal: whether a token sees those before it only.
        keeps_last: whether a prompt's logits are those of its last token.
        deltas: multiplications per token with SIMoE's deltas, which are folded into the weights after a single prompt.
    """

    body: Cost
    head: Cost
    attention: tuple[Attention, ...]
    is_causal: bool
    keeps_last: bool
    deltas: int = 0

    def decode_flops(self, context: int, batch: int = 1) -> int:
        """Floating point operations of one new token that sees `context` tokens, itself among them, in a batch."""
        seen = sum(
            (layer.multiplications + layer.expansion) * layer.keys(context) - layer.expansion  # its own is in the body
            for layer in self.attention
        )
        apart = self.deltas if batch > 1 else 0
        return round(2 * (self.body.multiplications + apart + self.head.multiplications + seen))

    def decode_bytes(self, context: int) -> int:
        """Bytes of weights and cache that one new token reads at batch 1."""
        cached = sum(layer.nbytes * layer.keys(context) for layer in self.attention)
        return round(self.body.nbytes + self.head.nbytes + cached)

    def prefill_flops(self, length: int) -> int:
        """Floating-point operations of processing one prompt of `length` tokens, two per multiplication. With SIMoE's
        deltas it goes through the layers twice: first without them, for the mixture of experts."""
        seen = sum(layer.multiplications * self._pairs(layer, length) for layer in self.attention)
        layers = (length * self.body.multiplications + seen) * (2 if self.deltas else 1) + length * self.deltas
        return round(2 * (layers + (1 if self.keeps_last else length) * self.head.multiplications))

    def _pairs(self, layer: Attention, length: int) -> int:
        """Number of pairs of a token and a key that it sees, in a prompt."""
        if not self.is_causal:
            return length * layer.keys(length)
        within = layer.keys(length)
        return within * (within + 1) // 2 + (length - within) * within


def model_costs(model: "PreTrainedModel", *, is_causal: bool = True) -> Costs:
    """Costs of a loaded model in its present form: experts that were made dense count as dense."""
    chosen, head = experts_per_token(model), model.get_output_embeddings()
    whole = of_module(model, chosen)
    logits = Cost() if head is None else of_module(head, chosen)
    body = Cost(*(all_ - own for all_, own in zip(whole, logits, strict=True)))
    deltas = sum(module.delta.numel() for module in model.modules() if isinstance(module, InterpolatedLinear))
    return Costs(body, logits, tuple(_attention(model)), is_causal, keeps_last(model), deltas)


@singledispatch
def of_module(module: nn.Module, chosen: int) -> Cost:
    """FLOPs and bytes of one module per token, if a token uses `chosen` of its experts."""
    found = getattr(module, "top_k", None)
    chosen = found if isinstance(found, int) else chosen
    own = dict(module.named_parameters(recurse=False))
    experts = 0 if isinstance(module, nn.Conv1d) else max((len(p) for p in own.values() if p.dim() == 3), default=0)
    share = min(_with_matrices(module, experts, chosen) / experts, Fraction(1)) if experts else Fraction(1)
    is_norm = type(module).__name__.endswith("Norm")  # some have weights [heads, width]
    return total(
        [
            *(_tensor("bias" if is_norm else name, tensor).times(share) for name, tensor in own.items()),
            *(of_module(child, chosen) for child in module.children()),
        ]
    )


def _with_matrices(module: nn.Module, experts: int, chosen: int) -> Fraction:
    """How many of the experts that a token chose have matrices, where `experts` of the module do, on average over
    tokens that choose all alike."""
    return Fraction(chosen * experts, experts + identities(module))


def _tensor(name: str, tensor: torch.Tensor) -> Cost:
    """A parameter that meets every token, unless it is a vector, or biases of experts below one another."""
    is_matrix = tensor.dim() > 1 and not name.endswith("bias") and not is_placeholder(tensor)
    return Cost(Fraction(tensor.numel() if is_matrix else 0), Fraction(tensor.numel() * tensor.element_size()))


@of_module.register
def _(module: nn.Embedding, chosen: int) -> Cost:
    return Cost(nbytes=Fraction(module.embedding_dim * module.weight.element_size()))


@of_module.register
def _(module: QuantizedEmbedding, chosen: int) -> Cost:
    return Cost(nbytes=Fraction(_stored_bytes(module), module.num_embeddings))


@of_module.register
def _(module: QuantizedLinear, chosen: int) -> Cost:
    """All codes and scales, those of an embedding if they are its own."""
    bias = 0 if module.bias is None else module.bias.numel() * module.bias.element_size()
    return Cost(Fraction(module.out_features * module.in_features), Fraction(_stored_bytes(module) + bias))


def _stored_bytes(module: QuantizedModule) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.stored.state_dict().values())


@of_module.register
def _(module: SharedBaseExperts, chosen: int) -> Cost:
    """The bases once, whatever the number of experts; deltas and biases of those that are chosen."""
    layout, dtype = module.layout, module.down_proj.dtype
    shape = layout.shape
    used = _with_matrices(module.native, shape.experts, chosen)
    biases = Cost(nbytes=Fraction(shape.bias_parameters * dtype.itemsize)).times(used)
    native = [
        Cost(Fraction(rows * columns), Fraction(rows * columns * dtype.itemsize)).times(used)
        for role in shape.roles
        if layout.weights[role] is None
        for rows, columns in [shape.matrix(role)]
    ]
    deltas = total(_delta(module, expert) for expert in range(shape.experts)).times(used / shape.experts)
    return total([biases, *native, deltas, _bases(module), _rotations(layout, used)])


@of_module.register
def _(module: SharedExpertOnBase, chosen: int) -> Cost:
    """The bases once more, on all tokens, and one delta."""
    biases = Cost(nbytes=Fraction(sum(p.numel() * p.element_size() for p in module.parameters())))
    return total([biases, _bases(module.experts), _delta(module.experts, module.experts.num_experts)])


def _bases(module: SharedBaseExperts) -> Cost:
    """With what all experts' deltas have in common, and where the channels of a pruned one belong."""
    layout, dtype = module.layout, module.down_proj.dtype
    indices = layout.base_channels * torch.int32.itemsize if layout.is_pruned else 0
    found = [Cost(nbytes=Fraction(indices))]
    for role in layout.shape.roles:
        if layout.weights[role] is not None:
            base, matrix = layout.base[role], layout.base_shape(role)
            nbytes = base.nbytes(matrix, dtype) + _nbytes(layout.shared_tensors(role).values(), dtype)
            found.append(Cost(Fraction(base.multiplications(matrix)), Fraction(nbytes)))
    return total(found)


def _rotations(layout: LayerLayout, chosen: Fraction) -> Cost:
    """Of a token's input once for gate and up, and of the activations of the experts that it chose."""
    turns = {role: turn for role in ("up", "down") if (turn := layout.input_rotation(role)) is not None}
    return total(
        Cost(Fraction(turn.multiplications * (chosen if role == "down" else 1))) for role, turn in turns.items()
    )


def _delta(module: SharedBaseExperts, expert: int) -> Cost:
    layout, dtype = module.layout, module.down_proj.dtype
    found = []
    for role in layout.shape.roles:
        if (weights := layout.weights[role]) is not None:
            matrix = layout.shape.matrix(role)
            nbytes = weights[expert].nbytes(matrix, dtype)
            found.append(Cost(Fraction(weights[expert].multiplications(matrix)), Fraction(nbytes)))
    return total(found)


def _nbytes(tensors: Iterable[Stored], dtype: torch.dtype) -> int:
    return sum(stored.nbytes(dtype) for stored in tensors)


@of_module.register
def _(module: NeuronExperts, chosen: int) -> Cost:
    """The selector, and the share of the neurons that is kept; for an oracle all that leads to their activations, too;
    for a projection that chooses, all of it. With all of them kept, the network as it was."""
    whole = of_module(module.ffn, chosen)
    if module.kept == module.num_experts:
        return whole
    matrices = {role: module.linear(role).weight for role in module.names}
    share, down = Fraction(module.kept, module.num_experts), matrices.pop("down")
    entering = {id(weight): weight for weight in matrices.values()}  # gate and up may be one
    first, second = total(_tensor("", weight) for weight in entering.values()), _tensor("", down)
    vectors = whole.nbytes - first.nbytes - second.nbytes + module.centre.numel() * module.centre.element_size()
    scores = [first] if module.selector_kind == "oracle" else []
    if module.selector_kind == "mlp":
        scores.append(of_module(module.selector, chosen))
    if isinstance(module, LedNeurons):
        scores.append(first.times((1 - share) / (1 if module.other is None else 2)))
        vectors += module.price.numel() * module.price.element_size()
    return total([Cost(nbytes=vectors), first.times(share), second.times(share), *scores])


@of_module.register
def _(module: InterpolatedLinear, chosen: int) -> Cost:
    """One weight with the mixture folded in, as tokens after a single prompt have it."""
    return of_module(module.linear, chosen)


@of_module.register
def _(module: Interpolation, chosen: int) -> Cost:
    """Once per prompt, not per token."""
    return Cost()


def _attention(model: "PreTrainedModel") -> Iterator[Attention]:
    """Of every layer, by the model's config; of none, where it has no attention."""
    config = model.config.get_text_config()
    if (heads := getattr(config, "num_attention_heads", None)) is None:
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        cached = 1
    key = value = size
    by_key, expansion = cached * (key + value), 0
    if rank := getattr(config, "kv_lora_rank", None):  # multi-head latent attention
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        by_key = heads * (key + value)
        # Else transformers caches what it expands to.
        if any(hasattr(module, "expand_kv") for module in model.modules()):
            by_key = rank + config.qk_rope_head_dim
            expansion = rank * heads * (config.qk_nope_head_dim + value)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    for kind in kinds:
        seen = window if kind == "sliding_attention" else None
        yield Attention(heads * (key + value), by_key * model.dtype.itemsize, seen, expansion)
