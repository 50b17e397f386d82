"""Description of a model family with experts: numbers, tensor names on disk, module names in memory.

An `Architecture` is data. It holds no code that depends on the family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NewType

from moetool.architectures.fused_layout import PLAIN, FusedLayout
from moetool.architectures.layers import DecoderLayers
from moetool.architectures.shape import ROLES, MoEShape, Role, by_name

# What a `config.json` says, and what transformers fills in where that says nothing, made by `checkpoint/settings.py`.
# A `config.json` as it stands is of another type, so that a type checker sees where a number is read from one.
Settings = NewType("Settings", dict[str, object])

# Keys that only an MoE model has in its config, whatever the family.
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# Those with the number of experts per token.
TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")

# Those with the width of one expert.
WIDTH_KEYS = ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size")

# Those with the number of groups of experts, and from how many of these a token's are taken.
GROUP_KEYS = (("n_group", "topk_group"), ("num_expert_group", "topk_group"))

# The two ways in which most families name a gated network's matrices, relative to it.
GATED: Mapping[Role, str] = {role: f"{role}_proj.weight" for role in ROLES}
GATED_JOINED: Mapping[Role, str] = {
    "gate": "gate_up_proj.weight",
    "up": "gate_up_proj.weight",
    "down": "down_proj.weight",
}


def whole_number(config: Mapping[str, object], *keys: str) -> int | None:
    """The first of these entries of a `config.json` that is there; `None` if none is, or it is no whole number."""
    value = next((_of_every_layer(config[key]) for key in keys if key in config), None)
    return value if isinstance(value, int) else None


def _of_every_layer(value: object) -> object:
    """What an entry says of all layers, if it says the same of each."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def experts_told(config: Mapping[str, object]) -> str | None:
    """Find an entry of a `config.json`, or of a config nested in it, that speaks of experts, e.g.
    `text_config.num_experts is 8`; `None` if there is none."""
    if key := next((key for key in EXPERT_KEYS if (whole_number(config, key) or 0) > 1), None):
        return f"{key} is {config[key]}"
    parts = {name: part.to_dict() if hasattr(part, "to_dict") else part for name, part in config.items()}
    inner = {name: experts_told(part) for name, part in parts.items() if isinstance(part, Mapping)}
    return next((f"{name}.{told}" for name, told in inner.items() if told), None)


@dataclass(frozen=True)
class Architecture(DecoderLayers):
    """The experts of one model: their number and sizes, the names of their tensors as templates, and other features of
    its layers.

    `{layer}` and `{expert}` are filled in with numbers. Names on disk are those of the hub's checkpoints; names in
    memory are what transformers 5 holds after loading, where `experts_module` owns the fused tensors
    `gate_up_proj [experts, 2·intermediate, hidden]` (`up_proj` without gates) and `down_proj [experts, hidden,
    intermediate]`, unless `in_memory` says otherwise.

    Attributes:
        name: as people say it.
        router_rule: in words; the router itself is never touched.
        layers: number of decoder layers.
        moe_layers: those of them that have experts.
        shape: of every MoE layer.
        groups: into how many groups the experts of a layer are divided, those that follow each other, and from how
            many a token's are taken; one and one without groups.
        layer: prefix of one decoder layer, on disk and in memory.
        layer_module: module path of one decoder layer in memory, if that is not `layer`.
        block: the MoE block on disk, relative to the layer. Every tensor in it must be known.
        weights: one expert's matrix on disk, relative to the block. A template without `{expert}` names one tensor
            for all experts, `[experts, out, in]`, which gate and up then share, one below the other.
        on_disk: how matrices lie in the one tensor for all experts, if not so.
        in_memory: how they lie in the fused tensors of transformers.
        router: router weight on disk, relative to the block.
        router_shape: of that, if not `[experts, hidden]`: rows after those of experts are for what a token may be
            given beside them (shared experts, nothing at all).
        sees_inputs: whether the router's logits are its weight times what experts are given.
        width: channels of the hidden states between layers, if not those that experts are given.
        router_others: other tensors with an entry per expert, `[experts]` or `[1, experts]`, relative to the layer.
        others: beginnings of the names of other tensors in the block, relative to it (shared experts, biases).
        experts_module: module path in memory, relative to the layer.
        shared_expert_module: path of the shared expert, relative to the layer, of a family that has one.
        shared_expert: its matrices, relative to it; gate and up may share a tensor, one below the other.
        attention: projections of a layer's attention, relative to it, those that some of its layers have.
        embeddings: those of tokens, and the head.
        own: prefix of moetool's own tensors, relative to the block.
        returns_tuple: a decoder layer gives a tuple, of which the model takes the first entry.
        handed_on: how many more entries that tuple has, which the model hands to the next layer.
        handed_channels: of the first of these, where it is a vector for each token; 0 otherwise.
    """

    name: str
    router_rule: str
    layers: int
    moe_layers: tuple[int, ...]
    shape: MoEShape
    layer: str
    block: str
    weights: Mapping[Role, str]
    router: str
    experts_module: str
    router_shape: tuple[int, int] | None = None
    sees_inputs: bool = True
    width: int | None = None
    groups: tuple[int, int] = (1, 1)
    layer_module: str = ""
    on_disk: FusedLayout = PLAIN
    in_memory: FusedLayout = PLAIN
    router_others: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    shared_expert_module: str = ""
    shared_expert: Mapping[Role, str] = field(default_factory=lambda: GATED)
    attention: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    own: str = "experts."
    returns_tuple: bool = False
    handed_on: int = 0
    handed_channels: int = 0

    def __post_init__(self) -> None:
        for name in ("weights", "shared_expert"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def is_fused(self) -> bool:
        """Whether one tensor on disk holds the matrices of all experts of a layer, not one tensor per expert."""
        return "{expert}" not in self.weights["down"]

    @property
    def hidden(self) -> int:
        """Number of channels of the hidden states between decoder layers, which experts of some families do not take
        whole."""
        return self.width or self.shape.hidden

    @property
    def routed_to(self) -> tuple[int, int]:
        """Shape of the router's weight: one row for each expert, and for whatever else it routes to."""
        return self.router_shape or (self.shape.experts, self.hidden)

    def block_prefix(self, layer: int) -> str:
        """`model.layers.3.block_sparse_moe.`, the whole MoE block on disk: router, experts and what else there is."""
        return self.layer_prefix(layer) + (f"{self.block}." if self.block else "")

    def experts_prefix(self, layer: int) -> str:
        """`model.layers.3.block_sparse_moe.experts.`, under which moetool's own tensors lie on disk."""
        return self.block_prefix(layer) + self.own

    def weight_name(self, layer: int, expert: int, role: Role) -> str:
        """Name on disk of one expert's matrix, or of the tensor that holds those of all experts."""
        return self.block_prefix(layer) + self.weights[role].format(expert=expert)

    def together(self, roles: Sequence[Role]) -> list[list[Role]]:
        """Some roles of all experts, those together that share a tensor on disk, where all experts do."""
        return [*by_name({role: self.weights[role] for role in roles}).values()]

    def shared_expert_names(self, layer: int) -> dict[Role, str]:
        """Names of the shared expert's matrices; empty for a family without one."""
        if not self.shared_expert_module:
            return {}
        prefix = f"{self.layer_prefix(layer)}{self.shared_expert_module}."
        return {role: prefix + name for role, name in self.shared_expert.items()}

    def bias_name(self, layer: int, role: Role) -> str:
        """Name on disk of the biases `[experts, out]` beside fused matrices that have some."""
        return f"{self.block_prefix(layer)}{self.weights[role]}_bias"

    def router_name(self, layer: int) -> str:
        """The name on disk of the weight `[experts, hidden]` of an MoE layer's router."""
        return self.block_prefix(layer) + self.router

    def is_router(self, layer: int, name: str) -> bool:
        """Whether a tensor belongs to the layer's router and so has an entry per expert."""
        others = (self.layer_prefix(layer) + other for other in self.router_others)
        return name.startswith(self.router_name(layer).removesuffix("weight")) or name in others
