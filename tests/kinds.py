"""A tiny checkpoint of every kind that moetool writes, filled with random numbers: layouts, and custom modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dense_families import build_dense
from families import build
from torch import Tensor, nn

from moetool.architectures import ROLES, MoEShape, Role
from moetool.format.entry import custom_entry, format_entry
from moetool.format.kinds import CustomModule
from moetool.format.kinds.moe import MoESpec, Shared
from moetool.format.kinds.moefied import MoefiedSpec, SelectorKind
from moetool.format.kinds.pesc import PescSpec
from moetool.format.kinds.simoe import SimoeSpec
from moetool.format.layout import LayerLayout
from moetool.format.marker import BESIDE
from moetool.quiet import quiet
from moetool.representations import Representation, parse_representation
from moetool.runtime.conversions import conversions_of
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import is_placeholder
from moetool.runtime.modules.quantized import QuantizedModule
from moetool.runtime.plugin import MoetoolConfig, MoetoolQuantizer

# A program that says of each checkpoint whether transformers loads it by itself.
WITHOUT_MOETOOL = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # as where moetool is not installed
import sys
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
        print("loaded")
    except RuntimeError as error:
        print("refused" if "mismatch" in str(error) else f"failed: {error}")
assert "moetool" not in sys.modules
"""

MIXTRAL = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
QWEN = MoEShape(experts=6, top_k=2, hidden=32, intermediate=24)
LAYERS = (0, 1, 2)


def _phi(shared: Shared) -> MoESpec:
    roles: tuple[Role, ...] = ("up", "down")
    return MoESpec(
        experts=4, top_k=2, intermediate=64, layers=LAYERS, shared=shared, of=3, hidden=32, roles=roles, biases=roles
    )


def _llama(shared: Shared) -> MoESpec:
    return MoESpec(
        experts=4, top_k=2, intermediate=48, layers=LAYERS, shared=shared, of=3, hidden=32, roles=ROLES, biases=()
    )


def layout(
    shape: MoEShape,
    *specs: str,
    base: str = "dense",
    channels: int | None = None,
    dynamic: int = 0,
    extended: bool = False,
    native: tuple[Role, ...] = (),
) -> LayerLayout:
    """Every role's experts as `specs` say, over and over."""
    stored = tuple(parse_representation(specs[i % len(specs)]) for i in range(shape.experts + extended))
    weights = {role: None if role in native else stored for role in shape.roles}
    bases = dict.fromkeys(shape.roles, parse_representation(base))
    return LayerLayout(shape, weights, channels or shape.intermediate, dynamic, bases)


def rotated(*specs: str, base: str = "low-rank:0", **seeds: int) -> LayerLayout:
    """Without a base if none is said, the inputs of some roles rotated."""
    return replace(layout(MIXTRAL, *specs, base=base), rotation=seeds)


def _mixtral(*layouts: LayerLayout) -> Any:
    return _with(build("mixtral"), format_entry(dict(enumerate(layouts))))


def _qwen(*layouts: LayerLayout) -> Any:
    model = build("qwen2_moe", shared_expert_intermediate_size=24, mlp_only_layers=[])
    return _with(model, format_entry(dict(enumerate(layouts))))


def _custom(family: str, spec: CustomModule, **layouts: Any) -> Any:
    return _with(build_dense(family), {**custom_entry(spec), **layouts})


def _neurons(family: str, selector: SelectorKind, keep: float = 0.5) -> Any:
    return _custom(family, MoefiedSpec(experts=8, keep=keep, selector=selector, layers=(0, 2)))


def _masks(family: str, channels: int | None) -> Any:
    model = build_dense(family)
    inner = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    listed = None if channels is None else dict.fromkeys(inner, channels)
    return _with(model, custom_entry(SimoeSpec(experts=4, router_width=8, sparsity=0.5, channels=listed)))


def _phi_on_base() -> Any:
    shape = MoEShape(4, 2, 32, 64, ("up", "down"), ("up", "down"))
    layouts = [
        layout(shape, "low-rank:3", extended=True),
        layout(shape, "shared-v:3", base="quantised-weight:8:16", extended=True),
        layout(shape, "quantised:4:16", channels=40, extended=True),
    ]
    layers = format_entry(dict(enumerate(layouts)))["layers"]
    return _custom("phi", _phi("xft"), layers=layers)


def _beside(family: str, names: Sequence[str], *layouts: LayerLayout) -> Any:
    """Attention of two layers and `names` in 8 bits."""
    names = [*names, *(f"model.layers.{layer}.self_attn.{role}_proj" for layer in (0, 2) for role in "qkvo")]
    forms = {name: f"quantised-weight:8:{'row' if 'v_proj' in name else 16}" for name in names}
    return _with(build(family), format_entry(dict(enumerate(layouts)), more={BESIDE: forms}))


KINDS: dict[str, Callable[[], Any]] = {
    "low-rank": lambda: _mixtral(
        layout(MIXTRAL, "low-rank:5", "dense", "low-rank:0"),
        layout(MIXTRAL, "low-rank:3", native=("down",)),
        layout(MIXTRAL, "low-rank:3", "dense", channels=40),
    ),
    "dynamic": lambda: _mixtral(
        layout(MIXTRAL, "low-rank:3", dynamic=9),
        layout(MIXTRAL, "low-rank:3", dynamic=9, base="quantised-weight:8:16"),
        layout(MIXTRAL, "low-rank:3", channels=40, dynamic=7),
    ),
    "shared-factors": lambda: _mixtral(
        layout(MIXTRAL, "shared-u:5"),
        layout(MIXTRAL, "shared-v:5"),
        layout(MIXTRAL, "shared-v:3", base="nf4"),
    ),
    "quantised": lambda: _mixtral(
        layout(MIXTRAL, "quantised:3:16"),
        layout(MIXTRAL, "quantised-low-rank:8:4:16", "quantised-low-rank:0:4:16"),
        layout(MIXTRAL, "quantised-weight:4:row"),
    ),
    "sparse": lambda: _mixtral(
        layout(MIXTRAL, "sparse:0.7:1", "low-rank-sparse:2:sparse:0.8:3"),
        layout(MIXTRAL, "sparse-magnitude:0.2", base="int8"),
        layout(MIXTRAL, "low-rank-sparse:2:sparse-magnitude:0.1"),
    ),
    "formats": lambda: _mixtral(
        layout(MIXTRAL, "nf4"), layout(MIXTRAL, "int8"), layout(MIXTRAL, "low-rank:2", "int8", base="nf4")
    ),
    "no-base": lambda: _mixtral(
        layout(MIXTRAL, "quantised:3:16", base="low-rank:0"),
        layout(MIXTRAL, "low-rank:5", "dense", "low-rank:0", base="low-rank:0"),
        layout(MIXTRAL, "nf4", "quantised:4:8", base="low-rank:0"),
    ),
    "shared-expert-on-base": lambda: _qwen(
        layout(QWEN, "low-rank:3", "dense", extended=True),
        layout(QWEN, "shared-u:3", extended=True),
        layout(QWEN, "low-rank:3", base="quantised-weight:4:8", dynamic=5, extended=True),
    ),
    "rotated": lambda: _mixtral(
        rotated("quantised:2:16", gate=1, up=1, down=2),
        rotated("low-rank:5", "quantised:4:8", "low-rank:0", down=3),
        rotated("quantised-low-rank:8:4:16", gate=5, up=5),
    ),
    "rotated-base": lambda: _mixtral(
        rotated("quantised:2:16", "low-rank:0", base="quantised-weight:2:16", gate=1, up=1, down=2),
        rotated("quantised:4:8", base="quantised-weight:4:8", down=3),
        rotated("low-rank:0", "quantised-low-rank:8:4:16", base="nf4", gate=5, up=5),
    ),
    "trellis": lambda: _mixtral(
        layout(MIXTRAL, "trellis:2:16", "trellis:3:8", "low-rank:0", base="trellis-weight:2:16"),
        rotated("trellis:1:16", "trellis:4:8", "quantised:2:16", gate=1, up=1),
        layout(
            MIXTRAL,
            "quantised-rows:6.0.6.4:8",
            "trellis-rows:6.5.5:16",
            "quantised-low-rank:8:4:16",
            base="trellis-weight:3:16",
        ),
    ),
    "shared-expert-without-base": lambda: _qwen(
        *(layout(QWEN, "quantised:4:8", base="low-rank:0", extended=True) for _ in range(3))
    ),
    "beside": lambda: _beside(
        "phimoe", ("model.embed_tokens", "lm_head"), *(layout(MIXTRAL, "low-rank:3") for _ in range(2))
    ),
    "beside-tied": lambda: _beside("granitemoe", ["model.embed_tokens"]),
    "mixture-on-base-with-biases": _phi_on_base,
    "mixture": lambda: _custom("llama", _llama("none")),
    "mixture-half": lambda: _custom("llama", _llama("half")),
    "mixture-with-biases": lambda: _custom("phi", _phi("med")),
    "adapters": lambda: _custom("llama", PescSpec(experts=4, top_k=2, layers=LAYERS, width=8, scale=1.0, dropout=0.0)),
    "masks": lambda: _masks("llama", None),
    "masks-pruned": lambda: _masks("gpt_neox", 12),
    "neurons-mlp": lambda: _neurons("llama", "mlp"),
    "neurons-all": lambda: _neurons("llama", "mlp", 1.0),
    "neurons-oracle-joined": lambda: _neurons("phi3", "oracle"),
    "neurons-fixed-biases": lambda: _neurons("gpt_neox", "fixed"),
    "neurons-spread": lambda: _neurons("opt", "mlp"),
    "neurons-encoder": lambda: _neurons("bert", "mlp"),
    "deepseek": lambda: build("deepseek"),
}


def save_kind(kind: str, path: Path) -> Path:
    """A checkpoint in fp32; returns its path."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        KINDS[kind]().save_pretrained(path)
    return path


@torch.no_grad()
def _with(model: Any, entry: Mapping[str, Any]) -> Any:
    """The model with what an entry `quantization_config` lists, filled at random."""
    torch.manual_seed(1)
    before = [*model.parameters(), *model.buffers()]  # kept, so that their ids are not given away
    native = set(map(id, before))
    quantizer = MoetoolQuantizer(MoetoolConfig(**entry))
    quantizer._process_model_before_weight_loading(model)
    for module in model.modules():
        if isinstance(module, SharedBaseExperts):
            _fill_stored(module)
            native.update(map(id, (*module.moetool.parameters(), *module.moetool.buffers())))
        if isinstance(module, QuantizedModule) and hasattr(module, "moetool"):
            group = module.stored.shape[1] // module.stored.scales.shape[1]
            _fill(module.stored, parse_representation(f"quantised-weight:8:{group}"), module.stored.shape)
            native.update(map(id, (*module.moetool.parameters(), *module.moetool.buffers())))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in native and not is_placeholder(tensor):
            tensor.copy_(_random(name, tensor, model))
    model.config.quantization_config = quantizer.quantization_config
    model._weight_conversions = conversions_of(model)
    return model


def _random(name: str, tensor: Tensor, model: Any) -> Tensor:
    if name.endswith("order"):
        return torch.randperm(len(tensor))
    if name.endswith("base_channels"):
        experts = model.get_submodule(name.rpartition(".")[0])
        return torch.randperm(experts.intermediate_dim)[: len(tensor)].sort().values
    if name.endswith("columns"):
        site = model.get_submodule(name.rpartition(".")[0])
        return torch.randperm(site.in_features)[: len(tensor)].sort().values
    if name.endswith("multiplier"):
        return torch.ones(1)
    return torch.randn(tensor.shape) / (tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 10)


def _fill_stored(experts: SharedBaseExperts) -> None:
    layout = experts.layout
    if "shared" in experts.moetool:
        for tensor in experts.moetool["shared"].parameters():
            tensor.copy_(torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5)
    for expert, role, representation in layout.deltas():
        _fill(experts.delta(expert, role), representation, layout.shape.matrix(role))
    for role, representation in layout.compact_bases():
        _fill(experts._compact(role), representation, layout.base_shape(role))


def _fill(weight: nn.Module, representation: Representation, shape: tuple[int, int]) -> None:
    matrix = 0.5 * torch.randn(shape) / shape[1] ** 0.5
    encoded = representation.encode(matrix, torch.float32)
    weight.load_state_dict({name: encoded[name] for name in representation.tensors(shape)})
