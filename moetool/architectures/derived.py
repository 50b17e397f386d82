"""A family whose layout is derived from transformers' own class, by `config.json` alone.

The model is built on the meta device, where it takes no memory. Experts are found by their class and shapes, names on
disk by turning transformers' conversion of checkpoints round, and numbers are read from the modules. The code of a
checkpoint (`auto_map`) is never run.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from moetool.architectures.base import (
    GATED,
    GATED_JOINED,
    GROUP_KEYS,
    TOP_K_KEYS,
    Architecture,
    experts_told,
    whole_number,
)
from moetool.architectures.described import (
    empty_model_of,
    entries_returned,
    experts_by_default,
    language_model_in,
    naming,
)
from moetool.architectures.entries import entries_of
from moetool.architectures.fused_layout import layout_of
from moetool.architectures.known import KNOWN
from moetool.architectures.probing import DiskNames, names_in_layers
from moetool.architectures.shape import IDENTITIES, NORM, ROLES, MoEShape, Role, fused_name
from moetool.architectures.trying import are_ordinary, takes_weighed_inputs
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

_IN_LAYER = re.compile(r"(?P<layers>.*?)\.(?P<index>\d+)\.(?P<inside>.+)")
_PLAIN = "transformers.integrations.moe"  # where act(gate) · up is, which most families' experts compute
# Entries that say which layers have experts.
_WHICH_LAYERS = re.compile(
    r"mlp_only_layers|mlp_layer_types|layers_block_type|first_k_dense_replace|num_dense_layers|enable_moe_block"
    r"|decoder_sparse_step|moe_layer_\w+|expert_layer_\w+|interleave_moe_layer_step|moe_layers"
)
_ROUTERS = ("gate", "router")  # names of the module, in all families of transformers
# Ways in which a shared expert names its matrices, relative to it.
_SHARED: tuple[Mapping[Role, str], ...] = (
    GATED,
    GATED_JOINED,
    {"gate": "input_linear.weight", "up": "input_linear.weight", "down": "output_linear.weight"},
)


def derive(config: Mapping[str, object]) -> Architecture:
    """The family and the numbers of an MoE model that transformers can build, from its `config.json` or settings.

    Raises:
        InvalidInputError: transformers does not know the model type or cannot build the model, or the experts, the
            router or their names on disk are of a kind that moetool does not handle. The message says which.
    """
    return _derived(entries_of(config))


@lru_cache(maxsize=32)
def _derived(entries: str) -> Architecture:
    config = json.loads(entries)
    model = empty_model_of(config)
    with naming(model, config, "is no MoE model that moetool handles"):
        return _Derivation(config, model).architecture()


class _Derivation:
    """What the modules of a model without weights say of its family.

    Every method raises `InvalidInputError` with a clause of an error message for what moetool cannot handle.
    """

    def __init__(self, config: Mapping[str, object], model: "PreTrainedModel") -> None:
        self.config, self.model = config, model
        self.text_config: PreTrainedConfig = model.config.get_text_config()
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.language = language_model_in(model)[0]
        self.layers, self.inside, self.moe_layers = self._find_experts()
        self.block = self.inside.rpartition(".")[0]
        self.tensors = self._tensors_of_layers()

    def _find_experts(self) -> tuple[str, str, tuple[int, ...]]:
        """Path of the list of layers, path of the experts in a layer, and the layers that have some."""
        from torch import nn

        places: dict[tuple[str, str], list[int]] = {}
        others = set[str]()
        start = f"{self.language}." if self.language else ""
        for name, module in self.modules.items():
            if not name.startswith(start):
                continue  # of what lies around the language model, which stays as it is
            down, found = getattr(module, "down_proj", None), _IN_LAYER.fullmatch(name)
            if found is None or not isinstance(down, nn.Parameter) or down.ndim != 3:
                if re.search("experts", type(module).__name__, re.IGNORECASE):
                    others.add(type(module).__name__)
            elif not hasattr(module, "has_gate") and not are_ordinary(module):  # not by transformers' decorator
                others.add(type(module).__name__)
            else:
                places.setdefault((found["layers"], found["inside"]), []).append(int(found["index"]))
        if not places:
            how = f"transformers runs its experts in a way of their own ({', '.join(sorted(others))})"
            raise InvalidInputError(how if others else self._without_experts())
        if len(places) > 1:
            kinds = ", ".join(inside for _, inside in places)
            raise InvalidInputError(f"its layers have experts of several kinds ({kinds})")
        [((layers, inside), found_in)] = places.items()
        return layers, inside, tuple(sorted(found_in))

    def _without_experts(self) -> str:
        """Why no layer has experts: what the config says of experts, and of the layers that have some."""
        told = experts_told(self.config) or experts_by_default(self.config)
        though = f", though {told}" if told else ""
        entries = self.text_config.to_dict().items()
        said = ", ".join(f"{key} is {value!s:.60}" for key, value in entries if _WHICH_LAYERS.fullmatch(key))
        why = f" ({said})" if said else "; `moetool upcycle` gives a dense model some"
        return f"none of its layers has experts{though}{why}"

    def _layer(self, index: int) -> "nn.Module":
        return self.modules[f"{self.layers}.{index}"]

    def _tensors_of_layers(self) -> dict[int, dict[str, "Tensor"]]:
        """Of some layers, the first MoE layer at first, all tensors by name relative to the layer: every name that
        some layer has is among them."""
        seen = set[str]()
        found: dict[int, dict[str, Tensor]] = {}
        for index in (self.moe_layers[0], *range(self.count)):
            own = self._layer(index).state_dict(keep_vars=True)
            if not own.keys() <= seen:
                found.setdefault(index, own)
                seen |= own.keys()
        return found

    @property
    def count(self) -> int:
        """Number of decoder layers of the model on the meta device."""
        return len([*self.modules[self.layers].children()])

    def architecture(self) -> Architecture:
        shape = self._shape()
        layer = f"{self.layers}.{{layer}}"
        in_memory = layout_of(self._experts(self.moe_layers[0]))
        names = names_in_layers(self.model, self.inside, self.tensors, layer, shape.groups, in_memory)
        router, router_shape, router_others, others = self._block_names(shape, names)
        width = int(self.text_config.hidden_size)
        block = _block(names)
        shared_module, shared = self._shared_expert(names)
        kind = type(self.model).__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        known = KNOWN.get(str(self.config["model_type"]))
        return Architecture(
            name=known.name if known else kind,
            router_rule=known.router_rule if known else f"as {type(self._router()[1]).__name__} computes it",
            layers=self.count,
            moe_layers=self.moe_layers,
            shape=shape,
            groups=self._groups(shape),
            layer=names.layer,
            layer_module="" if layer == names.layer else layer,
            block=block,
            weights={role: _within(block, name) for role, name in names.weights.items()},
            own=_within(block, names.own),
            on_disk=names.on_disk,
            in_memory=in_memory,
            router=router,
            router_shape=None if router_shape == (shape.experts, width) else router_shape,
            sees_inputs=width == shape.hidden and self._routes_by_one_matrix(),
            width=None if width == shape.hidden else width,
            experts_module=self.inside,
            router_others=router_others,
            others=others,
            shared_expert_module=shared_module,
            shared_expert=shared,
            attention=self._attention(names),
            embeddings=self._embeddings(),
            returns_tuple=self._returned() > 1,
            handed_on=self._returned() - 1,
            handed_channels=getattr(self.text_config, known.handed_on, 0) if known and known.handed_on else 0,
        )

    def _shape(self) -> MoEShape:
        found = {self._shape_of(layer) for layer in self.moe_layers}
        if len(found) > 1:
            raise InvalidInputError("its layers have different numbers or sizes of experts")
        return found.pop()

    def _shape_of(self, layer: int) -> MoEShape:
        experts: Any = self._experts(layer)
        roles = ROLES if getattr(experts, "has_gate", True) else ROLES[1:]
        biases = roles if getattr(experts, "has_bias", False) else ()
        count, hidden, intermediate = (int(size) for size in layout_of(experts).rows(experts.down_proj).shape)
        shape = MoEShape(count, self._top_k(layer), hidden, intermediate, roles, biases)
        promised: dict[str, tuple[int, ...]] = {}
        for group in shape.groups:
            rows, columns = shape.matrix(group[0])
            rows *= len(group)
            promised[fused_name(group)] = (count, *layout_of(experts).shape(rows, columns))
            if shape.biases:
                promised[f"{fused_name(group)}_bias"] = (count, rows)
        inside = [(name, tuple(parameter.shape)) for name, parameter in experts.named_parameters()]
        norm = f"{NORM}." if getattr(experts, "has_post_expert_norm", False) else "/"
        found = {name: size for name, size in inside if not name.startswith(norm)}
        if extra := sorted(found.keys() - promised.keys()):
            raise InvalidInputError(f"its experts have more than matrices ({', '.join(extra)})")
        if found != promised:
            raise InvalidInputError(f"its experts' matrices do not have the shapes that fit each other ({found})")
        if shape.top_k > count:
            raise InvalidInputError(f"it routes every token to {shape.top_k} of {count} experts")
        if shape.top_k > 1 and takes_weighed_inputs(experts):
            raise InvalidInputError("its router weighs the inputs of experts, and a token has several of them")
        return shape

    def _experts(self, layer: int) -> "nn.Module":
        return self._layer(layer).get_submodule(self.inside)

    def _router(self, layer: int | None = None) -> tuple[str, "nn.Module"]:
        """Name of the router's module in the block, and the module."""
        block = self._layer(self.moe_layers[0] if layer is None else layer).get_submodule(self.block)
        found = [(name, module) for name, module in block.named_children() if name in _ROUTERS]
        if len(found) != 1:
            raise InvalidInputError(f"its router is not one module beside the experts ({type(block).__name__})")
        return found[0]

    def _top_k(self, layer: int) -> int:
        """Number of experts to which the router of a layer sends each token."""
        router = self._router(layer)[1]
        block = self._layer(layer).get_submodule(self.block)
        own = (getattr(module, "top_k", None) for module in (router, *router.modules(), block))
        found = next((value for value in own if isinstance(value, int)), None)
        if found is None:
            config = self.text_config
            declared = (key for key in TOP_K_KEYS if hasattr(type(config), key))  # others are there, and not read
            found = whole_number(vars(config), *declared, *TOP_K_KEYS)
        if found is None or found < 1:
            raise InvalidInputError("nothing says how many experts a token goes to")
        return found

    def _routes_by_one_matrix(self) -> bool:
        """Whether the router's parameters are one matrix of several rows, and vectors."""
        parameters = self._router()[1].parameters()
        return sum(parameter.ndim == 2 and len(parameter) > 1 for parameter in parameters) == 1

    def _block_names(
        self, shape: MoEShape, names: DiskNames
    ) -> tuple[str, tuple[int, int], tuple[str, ...], tuple[str, ...]]:
        """On disk: the router's weight, relative to the block, and its shape; what else has an entry per expert,
        relative to the layer; and beginnings of the names of all other tensors in the block, relative to it."""
        router_name, router = self._router()
        start = f"{self.block}." if self.block else ""
        block = _block(names)
        biases = self._biases(shape, names)
        layers = reversed(self.tensors.values())
        shapes = {name: tuple(tensor.shape) for layer in layers for name, tensor in layer.items()}
        held = {name for layer in self.moe_layers for name in self._layer(layer).state_dict(keep_vars=True)}
        inside = {
            name: places
            for name, places in names.others.items()
            if name in held and name not in biases and (name.startswith(start) or not block)
        }
        of_router = [name for name in inside if name.startswith(f"{start}{router_name}.") and len(shapes[name]) == 2]
        chosen = shape.experts + (getattr(self._experts(self.moe_layers[0]), IDENTITIES, None) or 0)
        weights = [name for name in of_router if shapes[name] == (chosen, self.text_config.hidden_size)]
        if not weights:  # it also routes to shared experts, or to nothing, or sees other channels
            weights = [name for name in of_router if shape.experts <= shapes[name][0] < 2 * shape.experts]
        if len(weights) != 1 or len(inside[weights[0]]) != 1:
            raise InvalidInputError(f"no one matrix of its router has a row for each expert ({type(router).__name__})")
        rows, columns = shapes[weights[0]]
        [weight] = inside.pop(weights[0])
        per_expert, others = set[str](), set[str]()
        for name, places in inside.items():
            is_row = shapes[name] in ((shape.experts,), (1, shape.experts), (rows,), (1, rows))
            of_expert = is_row and name.startswith(start) and "shared" not in name
            for place in places:
                if of_expert:
                    per_expert.add(place)
                elif not block or place.startswith(f"{block}."):
                    own = _within(block, place)
                    is_whole = "." not in own or name.startswith(f"{self.inside}.")
                    others.add(own if is_whole else own.partition(".")[0] + ".")
        return _within(block, weight), (rows, columns), tuple(sorted(per_expert)), tuple(sorted(others))

    def _biases(self, shape: MoEShape, names: DiskNames) -> set[str]:
        """Names in memory, relative to the layer, of the experts' biases, which lie on disk beside their matrices."""
        found = set()
        for group in shape.groups if shape.biases else ():
            found.add(name := f"{self.inside}.{fused_name(group)}_bias")
            if names.others[name] != (f"{names.weights[group[0]]}_bias",):
                raise InvalidInputError(f"its experts' biases lie apart from their matrices ({names.others[name]})")
        return found

    def _shared_expert(self, names: DiskNames) -> tuple[str, Mapping[Role, str]]:
        """Path of the shared expert, relative to the layer, and its matrices, if they are gate, up and down alone and
        lie on disk under the names that they have in memory; otherwise an empty path."""
        layer = self._layer(self.moe_layers[0])
        own_gate = getattr(type(layer.get_submodule(self.inside)), "_apply_gate", None)
        if own_gate is not None and own_gate.__module__ != _PLAIN:
            return "", GATED  # the shared one may compute something else
        for path, module in layer.named_modules():
            if "shared" not in path.rpartition(".")[2]:
                continue
            tensors = {f"{path}.{name}" for name in module.state_dict()}
            for matrices in _SHARED:
                own = {f"{path}.{name}" for name in matrices.values()}
                if tensors == own and all(names.others.get(name) == (name,) for name in own):
                    return path, matrices
        return "", GATED

    def _attention(self, names: DiskNames) -> tuple[str, ...]:
        """Projections of attention, relative to the layer, that have the same name on disk and in memory."""
        found: dict[str, None] = {}
        for index in self.tensors:
            for path, module in self._layer(index).named_children():
                if re.search("attn|attention|^conv$", path) or type(module).__name__.endswith("Attention"):
                    linear = _linear(path, module)
                    if not linear:  # LongCat-Flash has two, DBRX one with norms around it
                        inside = module.named_children()
                        linear = [one for name, part in inside for one in _linear(f"{path}.{name}", part)]
                    found |= dict.fromkeys(linear)
        return tuple(path for path in found if names.others.get(f"{path}.weight") == (f"{path}.weight",))

    def _embeddings(self) -> tuple[str, ...]:
        """Names on disk of the embedding of tokens and of the head."""
        from transformers.core_model_loading import revert_weight_conversion

        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        weights = {f"{name}.weight": end.weight for end in ends for name, own in self.modules.items() if own is end}
        on_disk = (revert_weight_conversion(self.model, {name: weight}) for name, weight in weights.items())
        return tuple(name.removesuffix(".weight") for found in on_disk for name in found if name.endswith(".weight"))

    def _returned(self) -> int:
        """Number of values that a decoder layer returns: 1 for hidden states alone."""
        return max(1, entries_returned(self._layer(0)))

    def _groups(self, shape: MoEShape) -> tuple[int, int]:
        """Number of groups of experts, and of those that are taken."""
        for keys in GROUP_KEYS:
            groups, taken = (whole_number(vars(self.text_config), key) for key in keys)
            if groups:
                if shape.experts % groups or (taken or 1) > groups:
                    raise InvalidInputError(
                        f"{keys[0]} is {groups} and {keys[1]} is {taken}; {shape.experts} experts cannot be divided "
                        "and chosen so"
                    )
                return groups, taken or 1
        return 1, 1


def _linear(path: str, module: "nn.Module") -> list[str]:
    """Paths of the linear layers that are direct children of the module at `path`."""
    from torch import nn

    return [f"{path}.{name}" for name, child in module.named_children() if type(child) is nn.Linear]


def _block(names: DiskNames) -> str:
    """Path on disk, relative to the layer, of what holds the experts; empty where they lie apart from moetool's own
    tensors beside them, so that nothing less than the layer holds both."""
    block = names.own.removesuffix("experts.").rstrip(".")
    inside = all(name.startswith(f"{block}.") for name in names.weights.values())
    return block if inside else ""


def _within(block: str, name: str) -> str:
    """A name relative to the block, of one relative to the layer. Raises `InvalidInputError`."""
    if block and not name.startswith(f"{block}."):
        raise InvalidInputError(f"on disk {name} lies apart from its experts ({block})")
    return name.removeprefix(f"{block}.") if block else name
