"""Description of a dense model family: where its feed-forward networks lie, and what else its layers do.

Like `Architecture`, a `DenseArchitecture` is data. What a family does beyond a plain Llama is a list of features; an
MoE family can hold it if it can express every one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from moetool.architectures.layers import DecoderLayers
from moetool.architectures.shape import Role

# What a layer may do that a plain Llama does not, as an error message says it.
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "qkv_bias": "biases on queries, keys and values",
        "attention_bias": "biases on all attention projections",
        "mlp_bias": "biases in the feed-forward network",
        "sliding_window": "sliding-window attention",
        "mixed_attention": "sliding windows in some layers only",
        "head_dim": "heads whose widths do not add up to the hidden size",
        "head_norm": "norms on every head's queries and keys",
        "query_norm": "norms on whole queries and keys, and after each block instead of before it",
        "partial_rotary": "rotary positions on a part of each head",
        "scaled_embedding": "embeddings that are multiplied by a constant",
        "narrow_norms": "norms whose weights are kept less one in 16 bits (--dtype float32 has room for the rest)",
        "multipliers": "multipliers on embeddings, attention, residuals and logits",
        "ungated": "a feed-forward network without a gate",
        "own_block": "a decoder layer that no MoE family shares",
        "dense_layers": "dense layers among those with experts",
        "shared_half": "a shared expert that gives half of the output",
        "shared_med": "a shared expert on top of un-renormalized routing (Med-MoE)",
        "shared_on_base": "a shared expert that is a delta to the base of the routed ones",
        "shared_xft": "a shared expert weighted by what routing leaves (XFT)",
    }
)


@dataclass(frozen=True)
class Spread:
    """A feed-forward network whose parts lie in the decoder layer itself, by their paths relative to it.

    Attributes:
        exit: what gives its output.
        activation: the activation function between, where it is a part of its own.
    """

    exit: str
    activation: str | None = None


@dataclass(frozen=True)
class DenseArchitecture(DecoderLayers):
    """A dense model, described by name templates; where other models surround it, these are of the language model
    alone.

    Attributes:
        name: as people say it.
        model_types: of `config.json`.
        reference: where the family is described.
        layers: number of its layers.
        ffn_layers: those of them that have a feed-forward network.
        layer: prefix of one decoder layer, on disk.
        ffn: the feed-forward network, relative to the layer, on disk and in memory.
        weights: its matrices by role, relative to it. Gate and up may share one tensor, one below the other; a network
            without a gate has `up` and `down`. A bias, where a checkpoint has one, has the name of its matrix with
            `bias` in the place of `weight`.
        is_transposed: the matrices are `[in, out]` on disk.
        kept: other tensors of the network, relative to it, which stay as they are: numbers of its activation.
        spread: set if the network is no module of its own: `ffn` is then what gets its input, and `weights` are
            relative to the layer.
        is_encoder: trained to fill in masked tokens, not to predict the next.
        joined_qkv: the tensor that holds queries, keys and values one below the other, relative to the layer.
        norm_offset: what the norms add to their weights.
        layer_module: module path of one decoder layer in memory, if that is not `layer`.
        returns_tuple: a decoder layer gives a tuple, of which the model takes the first entry.
        handed_on: how many more entries that tuple has.
        unused: beginnings of the names of tensors that the hub's files have and the language model does not compute
            with.
        features: what its layers do beyond a plain Llama's, by the names of `FEATURES`.
        optional_features: those that a config key turns on, by that key.
    """

    name: str
    model_types: tuple[str, ...]
    reference: str
    layers: int
    ffn_layers: tuple[int, ...]
    layer: str
    ffn: str
    weights: Mapping[Role, str]
    is_transposed: bool = False
    kept: tuple[str, ...] = ()
    spread: Spread | None = None
    is_encoder: bool = False
    joined_qkv: str | None = None
    norm_offset: float = 0.0
    layer_module: str = ""
    returns_tuple: bool = False
    handed_on: int = 0
    unused: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    optional_features: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the feed-forward network's matrices, in the order in which inputs meet them: gate if there is one,
        up, down."""
        return tuple(self.weights)

    @property
    def is_joined(self) -> bool:
        """Whether one tensor on disk holds gate and up."""
        return self.weights.get("gate") == self.weights["up"]

    def ffn_prefix(self, layer: int) -> str:
        """The beginning of the tensor names of a layer's feed-forward network, such as `model.layers.3.mlp.`, with its
        dot."""
        return f"{self.layer_prefix(layer)}{self.ffn}."

    def weight_name(self, layer: int, role: Role) -> str:
        """Name on disk of one matrix, or of the tensor that holds gate and up."""
        prefix = self.ffn_prefix(layer) if self.spread is None else self.layer_prefix(layer)
        return prefix + self.weights[role]

    def bias_name(self, layer: int, role: Role) -> str:
        """Name on disk of the bias beside one matrix, of a checkpoint that has one."""
        return self.weight_name(layer, role).removesuffix("weight") + "bias"

    @property
    def linear_paths(self) -> Mapping[Role, str]:
        """The linear layer of every role, relative to the network where that is put into a module of moetool's: one
        that is spread over its layer is then a module, whose parts are called by their roles."""
        return {role: role if self.spread else name.removesuffix(".weight") for role, name in self.weights.items()}

    @property
    def placeholder(self) -> str:
        """The weight in the network's place, relative to it, that other loaders expect: up's, or for one that is spread
        over its layer that of the module which gets its input."""
        return self.weights["up"].removeprefix(f"{self.ffn}.") if self.spread else self.weights["up"]

    def tensors(self, layer: int) -> dict[str, str]:
        """Names on disk of all tensors that one layer's network may have, and what each is called relative to it where
        it is put into a module of moetool's."""
        found = {}
        for role, path in self.linear_paths.items():
            found[self.weight_name(layer, role)] = f"{path}.weight"
            found[self.bias_name(layer, role)] = f"{path}.bias"
        return found | {self.ffn_prefix(layer) + name: name for name in self.kept}
