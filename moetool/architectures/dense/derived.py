"""A dense family whose layout is derived from transformers' own class, by `config.json` alone.

The model is built on the meta device, where it takes no memory, and its feed-forward networks are found by what they
compute. The code of a checkpoint (`auto_map`) is never run.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from moetool.architectures.dense.base import DenseArchitecture, Spread
from moetool.architectures.dense.known import KNOWN_DENSE, OTHER_DENSE, is_encoder
from moetool.architectures.dense.networks import Network, is_linear, may_be_network, network_in, size_of
from moetool.architectures.described import (
    check_model_type,
    empty_model_of,
    entries_returned,
    language_model_in,
    naming,
    transformers_config,
)
from moetool.architectures.entries import entries_of
from moetool.architectures.shape import Role
from moetool.errors import InvalidInputError
from moetool.quiet import refused

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

MOST_LAYERS = 4096
_IN_LAYER = re.compile(r"(?P<layers>.*?)\.(?P<index>\d+)(?:\.(?P<inside>.+))?")
_HEADS = re.compile(r"(LMHeadModel|LMHead|DoubleHeads|For[A-Z]\w*)(Model)?$")
# Parts of a layer that have matrices in these shapes, too, and are no feed-forward networks.
_OTHERS = re.compile(r"attn|attention|mamba|temporal|conv|laurel|norm|adapter", re.IGNORECASE)
ACTIVATIONS = ("activation_fn", "activation", "act_fn", "act", "intermediate_act_fn")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def derive_dense(config: Mapping[str, object]) -> DenseArchitecture:
    """The family of a dense model that transformers can build, from its `config.json` or settings.

    Raises:
        InvalidInputError: transformers does not know the model type or cannot build the model, or its feed-forward
            networks or their names on disk are of a kind that moetool does not handle. The message says which.
    """
    return _derived(entries_of(config))


@lru_cache(maxsize=64)
def _derived(entries: str) -> DenseArchitecture:
    config = json.loads(entries)
    for key in _LAYER_KEYS:
        if isinstance(count := config.get(key), int) and count > MOST_LAYERS:
            raise InvalidInputError(f"config.json: {key} is {count}, but should be at most {MOST_LAYERS}.")
    model = _empty_model(config)
    with naming(model, config, "has no feed-forward networks that moetool handles"):
        return _Derivation(config, model).architecture()


def has_experts(config: Mapping[str, object]) -> bool:
    """Whether modules of a model, whose config names some, are experts; so too where transformers cannot build it."""
    try:
        model = _empty_model(json.loads(entries_of(config)))
    except InvalidInputError:
        return True
    return any(re.search("experts|moe", type(module).__name__, re.IGNORECASE) for module in model.modules())


def _empty_model(config: Mapping[str, object]) -> "PreTrainedModel":
    if not is_encoder(config):
        return empty_model_of(config)
    import torch
    from transformers import AutoModelForMaskedLM

    check_model_type(config)
    with refused(f"build the {config['model_type']} model that config.json describes"), torch.device("meta"):
        return AutoModelForMaskedLM.from_config(transformers_config(config))


# Of a network: matrices by role, whether they are `[in, out]`, other tensors, and shapes by name.
_Description: TypeAlias = tuple[
    tuple[tuple[Role, str], ...], bool, tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]
]


class _Derivation:
    """What the modules of a model without weights say of its feed-forward networks.

    Every method raises `InvalidInputError` with a clause of an error message for what moetool cannot handle.
    """

    def __init__(self, config: Mapping[str, object], model: "PreTrainedModel") -> None:
        self.config, self.model = config, model
        self.text_config: PreTrainedConfig = model.config.get_text_config()
        if not isinstance(hidden := getattr(self.text_config, "hidden_size", None), int):
            raise InvalidInputError("it is made of several models")
        self.hidden: int = hidden
        self.reasons: dict[str, str] = {}
        self.layers, self.inside, self.found = self._find()

    def _find(self) -> "tuple[str, str, dict[int, tuple[nn.Module, Network | _Parts]]]":
        """Path of the list of layers, path of the networks in a layer (empty where they are spread over it), and the
        layers that have one."""
        known: dict[object, Network | _Parts | None] = {}
        places: dict[tuple[str, str], dict[int, tuple[nn.Module, Network | _Parts]]] = {}
        start = f"{path}." if (path := language_model_in(self.model)[0]) else ""
        for name, module in self.model.named_modules():
            if not name.startswith(start) or not (at := _IN_LAYER.fullmatch(name)):
                continue
            inside = at["inside"] or ""
            if _OTHERS.search(inside):
                continue
            key = type(module), str([(part, tuple(tensor.shape)) for part, tensor in module.named_parameters()])
            if key not in known:
                known[key] = self._network(inside, module) if inside else _parts_of(module, self.hidden)
            if (network := known[key]) is not None:
                places.setdefault((at["layers"], inside), {})[int(at["index"])] = module, network
        if not places:
            raise InvalidInputError(next(iter(self.reasons.values()), "none of its layers has one"))
        if len(places) > 1:
            named = ", ".join(f"{layers}.{{layer}}.{inside}".rstrip(".") for layers, inside in places)
            raise InvalidInputError(f"they lie in several places ({named})")
        [((layers, inside), found)] = places.items()
        return layers, inside, found

    def _network(self, inside: str, module: "nn.Module") -> Network | None:
        if not may_be_network(module, self.hidden):
            return None
        try:
            return network_in(module)
        except InvalidInputError as error:
            self.reasons.setdefault(inside, str(error))
            return None

    def architecture(self) -> DenseArchitecture:
        count = len(self.model.get_submodule(self.layers))
        if count != self.text_config.num_hidden_layers:
            raise InvalidInputError(f"they lie in {count} of {self.text_config.num_hidden_layers} layers")
        kinds = {self._described(module, network) for module, network in self.found.values()}
        if len(kinds) > 1:
            raise InvalidInputError("they differ from layer to layer in sizes or names")
        [(weights, is_transposed, kept, _)] = kinds
        _, network = next(iter(self.found.values()))
        spread = network.spread if isinstance(network, _Parts) else None
        ffn = network.entry if isinstance(network, _Parts) else self.inside
        known = KNOWN_DENSE.get(type(self.model).config_class.model_type, OTHER_DENSE)
        model_type = str(self.config["model_type"])
        layer = f"{self.layers}.{{layer}}"
        on_disk = self._layer_on_disk([name if spread else f"{ffn}.{name}" for _, name in weights])
        returned = entries_returned(self.model.get_submodule(f"{self.layers}.{next(iter(self.found))}"))
        gateless = () if len(weights) == len(("gate", "up", "down")) else ("ungated",)
        encodes = is_encoder(self.config)
        return DenseArchitecture(
            name=_HEADS.sub("", type(self.model).__name__),
            model_types=(model_type,),
            reference=f"https://huggingface.co/docs/transformers/model_doc/{model_type}",
            layers=count,
            ffn_layers=tuple(sorted(self.found)),
            layer=on_disk,
            ffn=ffn,
            weights=dict(weights),
            is_transposed=is_transposed,
            kept=kept,
            spread=spread,
            is_encoder=encodes,
            joined_qkv=known.joined_qkv,
            norm_offset=known.norm_offset,
            layer_module="" if layer == on_disk else layer,
            returns_tuple=returned > 0,
            handed_on=max(0, returned - 1),
            unused=(f"{self.model.base_model_prefix}.pooler.", "cls.seq_relationship.") if encodes else (),
            features=(*known.features, *gateless),
            optional_features=known.optional_features,
        )

    def _described(self, module: "nn.Module", network: "Network | _Parts") -> _Description:
        """Of one network: its matrices by role, whether they are `[in, out]`, other tensors, and sizes."""
        linear = network.linear
        tensors = module.state_dict(keep_vars=True)
        ends = {f"{path}.{kind}" for path in linear.values() for kind in ("weight", "bias")}
        kept = () if isinstance(network, _Parts) else tuple(sorted(set(tensors) - ends))
        tied = {*self.model.all_tied_weights_keys, *self.model.all_tied_weights_keys.values()}
        if any(name.startswith(f"{self.layers}.") for name in tied):
            raise InvalidInputError("its layers share weights with each other")
        sizes = tuple((name, tuple(tensors[name].shape)) for name in sorted(ends & set(tensors)))
        weights = tuple((role, f"{path}.weight") for role, path in linear.items())
        return weights, network.is_transposed, kept, sizes

    def _layer_on_disk(self, names: list[str]) -> str:
        """The prefix of a decoder layer's tensors on disk, a template with `{layer}` for its index."""
        from transformers.core_model_loading import revert_weight_conversion

        index = next(iter(self.found))
        prefixes = set()
        for name in dict.fromkeys(names):
            full = f"{self.layers}.{index}.{name}"
            [*places] = revert_weight_conversion(self.model, {full: self.model.get_parameter(full)})
            if len(places) != 1 or not places[0].endswith(f".{index}.{name}"):
                raise InvalidInputError(f"on disk {full} lies elsewhere ({', '.join(places)})")
            prefixes.add(places[0].removesuffix(f".{index}.{name}"))
        if len(prefixes) != 1:
            raise InvalidInputError(f"on disk their matrices lie apart ({', '.join(sorted(prefixes))})")
        return f"{prefixes.pop()}.{{layer}}"


class _Parts:
    """A feed-forward network whose parts lie in the decoder layer itself."""

    is_transposed = False

    def __init__(self, entry: str, up: str, down: str, activation: str | None) -> None:
        self.entry, self.spread = entry, Spread(exit=down, activation=activation)
        self.linear: Mapping[Role, str] = {"up": up, "down": down}


def _parts_of(layer: "nn.Module", hidden: int) -> _Parts | None:
    """The network that is spread over a layer, if there is one: two matrices and an activation between (OPT), or BERT's
    `intermediate` with the first and the activation, and `output` with the second."""
    from torch import nn

    linears = {name: size_of(child) for name, child in layer.named_children() if type(child) is nn.Linear}
    matrices = sum(map(is_linear, layer.modules()))  # more than these: its attention's
    if len(linears) == 2 < matrices and len({re.sub(r"\d", "", name) for name in linears}) == 1:  # fc1 and fc2
        (up, (width, entering)), (down, (leaving, inner)) = linears.items()
        found = [name for name in ACTIVATIONS if callable(getattr(layer, name, None))]
        if entering == leaving == hidden and width == inner and len(found) == 1:
            return _Parts(up, up, down, found[0])
    parts = dict(layer.named_children())
    if not {"intermediate", "output"} <= parts.keys():
        return None
    intermediate, output = parts["intermediate"], parts["output"]
    first, second = (getattr(part, "dense", None) for part in (intermediate, output))
    if not is_linear(first) or not is_linear(second):
        return None
    own = {name.partition(".")[0] for name, _ in intermediate.named_parameters()}
    if own == {"dense"} and size_of(first) == size_of(second)[::-1]:
        return _Parts("intermediate", "intermediate.dense", "output.dense", None)
    return None
