"""Low-rank adaptation of what is not trained itself (LoRA, arXiv:2106.09685; QLoRA, arXiv:2305.14314), by peft."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.numerics.seeding import generator, linear_std, uniform
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import CustomLayer, is_placeholder
from moetool.runtime.modules.networks import SplitFFN
from moetool.runtime.modules.quantized_in_model import is_quantized

Quantization = Literal["none", "nf4", "int8"]


@dataclass(frozen=True)
class Adapted:
    """What low-rank factors are added to.

    Attributes:
        linears: names of linear layers.
        experts: names of tensors `[experts, …, …]`, each of which has as many pairs of factors.
    """

    linears: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.linears or self.experts)

    def numbers(self, model: nn.Module, rank: int) -> int:
        """How many numbers the factors of a rank are."""
        linears = [model.get_parameter(f"{name}.weight").shape for name in self.linears]
        experts = [model.get_parameter(name).shape for name in self.experts]
        return rank * (sum(map(sum, linears)) + sum(count * (rows + columns) for count, rows, columns in experts))

    def largest(self, model: nn.Module) -> int:
        """How many numbers the largest layer's experts have to which factors are added."""
        layers = Counter[str]()
        for name in self.experts:
            layers[name.rpartition(".")[0]] += model.get_parameter(name).numel()
        return max(layers.values(), default=0)


def frozen_linears(model: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers below decoder layers that nothing else trains."""
    split = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, SplitFFN))
    return tuple(
        name
        for name, module in _in_layers(model)
        if _is_linear(name, module) and not is_quantized(module) and not module.get_parameter("weight").requires_grad
        if not name.startswith(split)  # whose neurons are computed a part at a time
    )


def _is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer that is called for its product. Routers return more than that; the matrices of
    grouped layers, and those that make Mamba's time steps, are used without a call."""
    other = type(module).__name__.endswith(("Router", "GroupedLinear")) or name.endswith("dt_proj")
    return isinstance(module, nn.Linear) and not other


def experts_in_full(model: nn.Module) -> tuple[str, ...]:
    """Names of the tensors `[experts, …, …]` in which transformers has the experts of a layer."""
    return tuple(
        f"{name}.{own}"
        for name, module in _in_layers(model)
        if "experts" in name and not isinstance(module, (SharedBaseExperts, CustomLayer))
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point() and not is_placeholder(parameter)
    )


def _in_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if any(map(str.isdigit, name.split("."))))


def add_lora(model: nn.Module, adapted: Adapted, rank: int, alpha: float, seed: int = 0) -> None:
    """Add trainable factors of that rank, scaled by alpha / rank; their product is zero, and one of them is drawn as a
    fresh `nn.Linear` is."""
    from peft import LoraConfig, inject_adapter_in_model

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[f"0.{name}" for name in adapted.linears],
        target_parameters=[f"0.{name}" for name in adapted.experts],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about transformers
        # In a model that it knows, peft takes linear layers of shared experts for those of the experts.
        inject_adapter_in_model(config, nn.ModuleList([model]))
    for name, layer in _adapters(model):
        first = layer.get_submodule("lora_A.default").get_parameter("weight")
        first.data.copy_(uniform((*first.shape,), linear_std(first.shape[1]), generator(seed, "lora", name)))
    for parameter in trained:
        parameter.requires_grad_(True)  # peft freezes everything else


def adapts_experts(model: nn.Module) -> bool:
    """Whether factors are added to experts, whose sums are made anew whenever a layer runs."""
    from peft.tuners.lora.layer import ParamWrapper

    return any(isinstance(module, ParamWrapper) for module in model.modules())


def _adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """peft's layers by the names of the linear layers and of the experts' tensors that they adapt."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in [*model.named_modules()]:
        if isinstance(module, ParamWrapper):  # around another one, where a module has several such tensors
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}", module
        elif isinstance(module, LoraLayer):
            yield name, module


def quantize_linears(model: nn.Module, names: Iterable[str], kind: Quantization, device: torch.device) -> None:
    """Hold the named linear layers quantized while others are trained, by bitsandbytes. Raises `UsageError`."""
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise UsageError("--quantize-base needs bitsandbytes: pip install bitsandbytes.") from error
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of every cast
    for name in names:
        linear: Any = model.get_submodule(name)
        rows, columns = linear.weight.shape
        has_bias = linear.bias is not None
        if kind == "nf4":
            small = bnb.nn.Linear4bit(columns, rows, bias=has_bias, compute_dtype=linear.weight.dtype, quant_type="nf4")
            # On a CPU, one pass in evaluation mode would pack its weight for good, in a way that has no gradient.
            small.support_avx512bf16_for_cpu = False
            small.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        else:
            small = bnb.nn.Linear8bitLt(columns, rows, bias=has_bias, has_fp16_weights=False)
            small.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        if has_bias:
            small.bias = nn.Parameter(linear.bias.data, requires_grad=False)
        model.set_submodule(name, small.to(device))


@torch.no_grad()
def merge_lora(model: nn.Module, source: Checkpoint) -> None:
    """Put ordinary layers back: the weights of the source, plus what their factors have learnt.

    Raises:
        InvalidInputError: a layer that was held quantized has another name in the checkpoint.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in _adapters(model):
        if isinstance(module, ParamWrapper):
            module.merge()
            experts = name.rpartition(".")[0]
            model.set_submodule(experts, module.get_base_layer())
            continue
        base = module.get_base_layer()
        exact = _exact_weight(name, base, source)
        delta = module.get_delta_weight("default")
        _set_linear(model, name, exact.float() + delta.to(exact.device, torch.float32), base.bias)
    for name, module in [*model.named_modules()]:
        if type(module).__module__.startswith("bitsandbytes"):
            _set_linear(model, name, _exact_weight(name, module, source), getattr(module, "bias", None))


def _exact_weight(name: str, base: nn.Module, source: Checkpoint) -> torch.Tensor:
    if not type(base).__module__.startswith("bitsandbytes"):
        return base.get_parameter("weight").data
    if f"{name}.weight" not in source.tensors:
        raise InvalidInputError(f"{source.path} has no tensor {name}.weight to add what was learnt to.")
    return source.read(f"{name}.weight").to(base.get_parameter("weight").device, torch.float32)


def _set_linear(model: nn.Module, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.data.to(weight.dtype), requires_grad=False)
    model.set_submodule(name, linear)
