"""What moetool knows about a model family: names on disk, names in memory, and where the config keeps its numbers.

An `Architecture` is data. It holds no code that depends on the family, so that a new family is one new file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NewType

from moetool.architectures.fused_layout import PLAIN, FusedLayout
from moetool.errors import InvalidInputError

# What a `config.json` says, and what transformers fills in where that says nothing, made by `checkpoint/settings.py`.
# A `config.json` as it stands is of another type, so that a type checker sees where a number is read from one.
Settings = NewType("Settings", dict[str, object])

Role = Literal["gate", "up", "down"]
ROLES: tuple[Role, ...] = ("gate", "up", "down")

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
# The two ways in which most families name one expert's matrices, relative to the MoE block.
PROJECTIONS: Mapping[Role, str] = {
    "gate": "experts.{expert}.gate_proj.weight",
    "up": "experts.{expert}.up_proj.weight",
    "down": "experts.{expert}.down_proj.weight",
}
NUMBERED: Mapping[Role, str] = {
    "gate": "experts.{expert}.w1.weight",
    "up": "experts.{expert}.w3.weight",
    "down": "experts.{expert}.w2.weight",
}
# Projections of attention, relative to the layer, and those of latent attention (DeepSeek-V2).
ATTENTION = tuple(f"self_attn.{letter}_proj" for letter in "qkvo")
LATENT_ATTENTION = tuple(
    f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
)


def fused_name(roles: Sequence[Role]) -> str:
    """What transformers calls the tensor of all experts' matrices of those roles: `gate_up_proj`, `down_proj`."""
    return "_".join(roles) + "_proj"


def by_name(names: Mapping[Role, str]) -> dict[str, list[Role]]:
    """The roles that each tensor holds, one below the other."""
    found: dict[str, list[Role]] = {}
    for role, name in names.items():
        found.setdefault(name, []).append(role)
    return found


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer: `experts` of `hidden` → `intermediate` → `hidden`, `top_k` of them per token.

    Attributes:
        roles: an expert's matrices, in order; without `gate` where experts have none.
        biases: those that have a bias `[out]` beside them. Every expert keeps its own biases, however its matrices are
            stored.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    roles: tuple[Role, ...] = ROLES
    biases: tuple[Role, ...] = ()

    @property
    def entering(self) -> tuple[Role, ...]:
        """The matrices that meet an expert's input: gate and up, or up alone."""
        return self.roles[:-1]

    @property
    def groups(self) -> tuple[tuple[Role, ...], ...]:
        """Matrices that are stored alike, and lie in one tensor where experts are fused."""
        return self.entering, ("down",)

    def group(self, role: Role) -> tuple[Role, ...]:
        """The matrices among which one is."""
        return next(roles for roles in self.groups if role in roles)

    @property
    def expert_parameters(self) -> int:
        """Numbers in one expert's matrices."""
        return len(self.roles) * self.hidden * self.intermediate

    @property
    def bias_parameters(self) -> int:
        """Numbers in one expert's biases."""
        return sum(self.matrix(role)[0] for role in self.biases)

    def matrix(self, role: Role) -> tuple[int, int]:
        """Shape `[out, in]` of one expert's matrix of that role, as torch stores it."""
        if role == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden


@dataclass(frozen=True)
class ModelNumbers:
    """Numbers of a model that are read from its modules or from moetool's entry, not from keys of `config.json`.

    Attributes:
        layers: decoder layers.
        moe_layers: those of them that have experts.
        shape: of every MoE layer.
        groups: into how many groups the experts are divided, and from how many of these a token's are taken.
    """

    layers: int
    moe_layers: tuple[int, ...]
    shape: MoEShape
    groups: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class MoELayers:
    """Which decoder layers are MoE layers, by the keys of `config.json`; every layer if no key says otherwise.

    Attributes:
        first_dense: key with the number of leading dense layers.
        every: key with n, every n-th layer being an MoE layer, and the index of the first that counts (`0`: layers 0,
            n, 2n …; `n - 1` is written as -1: layers n-1, 2n-1 …).
        dense: key with a list of dense layers.
        last: key with the last layer that may be one; -1 for the last of all.
        kinds: key with a list of every layer's kind, `sparse` or `dense`, which counts for more than all others.
    """

    first_dense: str | None = None
    every: tuple[str, Literal[0, -1]] | None = None
    dense: str | None = None
    last: str | None = None
    kinds: str | None = None

    def among(self, layers: int, config: Settings) -> tuple[int, ...]:
        """The MoE layers among that many layers.

        Raises:
            InvalidInputError: an entry is not of the kind it has to be.
        """
        if (kinds := config.get(self.kinds) if self.kinds else None) is not None:
            if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {"sparse", "dense"}:
                raise InvalidInputError(
                    f"config.json: '{self.kinds}' must be a list of {layers} × 'sparse' or 'dense', found {kinds!r}."
                )
            return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
        first = config.get(self.first_dense, 0) if self.first_dense else 0
        last = config.get(self.last, -1) if self.last else -1
        step, offset = (config.get(self.every[0], 1), self.every[1]) if self.every else (1, 0)
        listed = (config.get(self.dense) or []) if self.dense else []
        first, step = _count(self.first_dense, first), _count(self.every and self.every[0], step)
        if not step:
            raise InvalidInputError(f"config.json: '{self.every and self.every[0]}' must not be 0.")
        if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
            raise InvalidInputError(f"config.json: '{self.dense}' must be a list of layers, found {listed!r}.")
        end = layers if last == -1 else min(layers, _count(self.last, last) + 1)
        return tuple(layer for layer in range(first, end) if (layer - offset) % step == 0 and layer not in listed)


def _count(key: str | None, value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise InvalidInputError(f"config.json: '{key}' must be a whole number, found {value!r}.")
    return value


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
    """What a `config.json` of any family, or one of the configs in it, says of experts: `text_config.num_experts is 8`;
    `None` if nothing."""
    if key := next((key for key in EXPERT_KEYS if (whole_number(config, key) or 0) > 1), None):
        return f"{key} is {config[key]}"
    inner = {name: experts_told(part) for name, part in config.items() if isinstance(part, Mapping)}
    return next((f"{name}.{told}" for name, told in inner.items() if told), None)


@dataclass(frozen=True)
class Unsupported:
    """A family whose experts or router do not fit, and why. A file that defines `UNSUPPORTED` refuses it."""

    name: str
    model_types: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Architecture:
    """One model family, by name templates.

    `{layer}` and `{expert}` are filled in with numbers. Names on disk are those of the hub's checkpoints; names in
    memory are what transformers 5 holds after loading, where `experts_module` owns the fused tensors
    `gate_up_proj [experts, 2·intermediate, hidden]` (`up_proj` without gates) and `down_proj [experts, hidden,
    intermediate]`, unless `in_memory` says otherwise.

    Attributes:
        name: as people say it.
        model_types: of `config.json`.
        reference: where the family is described.
        experts_key: config key, number of routed experts; several, if versions of transformers write different ones.
        intermediate_key: config key, width of one expert.
        router_rule: in words; the router itself is never touched.
        layer: prefix of one decoder layer, on disk and in memory.
        block: the MoE block on disk, relative to the layer. Every tensor in it must be known.
        weights: one expert's matrix on disk, relative to the block. A template without `{expert}` names one tensor
            for all experts, `[experts, out, in]`, which gate and up then share, one below the other.
        on_disk: how matrices lie in the one tensor for all experts, if not so.
        in_memory: how they lie in the fused tensors of transformers.
        router: router weight on disk, relative to the block.
        experts_module: module path in memory, relative to the layer.
        top_k_key: config key, experts per token.
        groups_keys: config keys, into how many groups the experts are divided and from how many of these a token's are
            taken, of a family that has groups.
        router_options: config keys that change the router's rule, and the values that transformers computes.
        router_others: other tensors with an entry per expert, `[experts]` or `[1, experts]`, relative to the layer.
        others: beginnings of the names of other tensors in the block, relative to it (shared experts, biases).
        moe_layers_rule: which layers are MoE layers.
        returns_tuple: a decoder layer gives a tuple, of which the model takes the first entry.
        handed_on: how many more entries that tuple has, which the model hands to the next layer.
        shared_expert_module: path of the shared expert, relative to the layer, of a family that has one.
        shared_expert: its matrices, relative to it; gate and up may share a tensor, one below the other.
        attention: projections of a layer's attention, relative to it, those that some of its models have.
        embeddings: those of tokens, and the head.
        aliases: parts of names that some tools write, and what stands there on the hub. Such a checkpoint is read as if
            it had the hub's names.
        own: prefix of moetool's own tensors, relative to the block.
        layer_module: module path of one decoder layer in memory, if that is not `layer`.
        given: numbers of this one model, of a family whose keys are not written down.
    """

    name: str
    model_types: tuple[str, ...]
    reference: str
    experts_key: str | tuple[str, ...]
    intermediate_key: str
    router_rule: str
    layer: str = "model.layers.{layer}"
    block: str = "mlp"
    weights: Mapping[Role, str] = field(default_factory=lambda: PROJECTIONS)
    on_disk: FusedLayout = PLAIN
    in_memory: FusedLayout = PLAIN
    router: str = "gate.weight"
    experts_module: str = "mlp.experts"
    top_k_key: str = "num_experts_per_tok"
    groups_keys: tuple[str, str] | None = None
    router_options: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    router_others: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    moe_layers_rule: MoELayers = field(default_factory=MoELayers)
    returns_tuple: bool = False
    handed_on: int = 0
    shared_expert_module: str = ""
    shared_expert: Mapping[Role, str] = field(default_factory=lambda: GATED)
    attention: tuple[str, ...] = ATTENTION
    embeddings: tuple[str, ...] = ("model.embed_tokens", "lm_head")
    aliases: Mapping[str, str] = field(default_factory=dict)
    own: str = "experts."
    layer_module: str = ""
    given: ModelNumbers | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "shared_expert", "aliases"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def is_fused(self) -> bool:
        """Whether all experts of a layer lie in one tensor on disk."""
        return "{expert}" not in self.weights["down"]

    @property
    def experts_keys(self) -> tuple[str, ...]:
        """Config keys of the number of routed experts, the first one that is there counts."""
        return (self.experts_key,) if isinstance(self.experts_key, str) else self.experts_key

    def layers(self, config: Settings) -> int:
        """Number of decoder layers of the model that these settings describe."""
        if self.given is not None:
            return self.given.layers
        return self.number(config, "num_hidden_layers")

    def moe_layers(self, config: Settings) -> tuple[int, ...]:
        """Which decoder layers are MoE layers, by `config.json`.

        Raises:
            InvalidInputError: none is, or an entry cannot be read.
        """
        if self.given is not None:
            return self.given.moe_layers
        found = self.moe_layers_rule.among(self.layers(config), config)
        if not found:
            raise InvalidInputError("By config.json no layer of this model has experts.")
        return found

    def shape(self, config: Settings) -> MoEShape:
        """The shape that `config.json` promises for every MoE layer.

        Raises:
            InvalidInputError: as `numbers`, or the router follows a rule that transformers does not compute for this
                family.
        """
        for key, known in self.router_options.items():
            if key in config and config[key] not in known:
                raise InvalidInputError(
                    f"config.json has {key} = {config[key]!r}: this router's rule is not implemented for {self.name}, "
                    f"which knows {', '.join(map(repr, known))}. Results would be wrong; refusing."
                )
        return self.numbers(config)

    def numbers(self, config: Settings) -> MoEShape:
        """The same, whatever the router's rule.

        Raises:
            InvalidInputError: a number is missing, or more experts are routed than exist.
        """
        if self.given is not None:
            return self.given.shape
        experts_key = next((key for key in self.experts_keys if key in config), self.experts_keys[0])
        shape = MoEShape(
            experts=self.number(config, experts_key),
            top_k=self.number(config, self.top_k_key),
            hidden=self.number(config, "hidden_size"),
            intermediate=self.number(config, self.intermediate_key),
        )
        if shape.top_k > shape.experts:
            raise InvalidInputError(
                f"config.json routes every token to {shape.top_k} experts ({self.top_k_key}) "
                f"but has only {shape.experts} ({experts_key})."
            )
        return shape

    def expert_groups(self, config: Settings) -> tuple[int, int]:
        """Into how many groups the experts of a layer are divided, those that follow each other, and from how many a
        token's are taken; one and one without groups."""
        if self.given is not None:
            return self.given.groups
        if self.groups_keys is None:
            return 1, 1
        groups, chosen = (whole_number(config, key) or 1 for key in self.groups_keys)
        return groups, chosen

    def number(self, config: Settings, key: str) -> int:
        """A positive integer of `config.json`, which may say it of every layer."""
        value = _of_every_layer(config.get(key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInputError(
                f"config.json of a {self.name} model needs a positive whole number '{key}', found {value!r}."
            )
        return value

    def layer_path(self, layer: int) -> str:
        """`model.layers.3`, the path of a decoder layer's module in memory."""
        return (self.layer_module or self.layer).format(layer=layer)

    def layer_prefix(self, layer: int) -> str:
        """`model.layers.3.`"""
        return self.layer.format(layer=layer) + "."

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
        """Name on disk of the layer's router weight."""
        return self.block_prefix(layer) + self.router

    def is_router(self, layer: int, name: str) -> bool:
        """Whether a tensor belongs to the layer's router and so has an entry per expert."""
        others = (self.layer_prefix(layer) + other for other in self.router_others)
        return name.startswith(self.router_name(layer).removesuffix("weight")) or name in others
