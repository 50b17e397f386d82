"""Low-rank adaptation of what is not trained itself (LoRA, arXiv:2106.09685; QLoRA, arXiv:2305.14314), by peft."""

import logging
import warnings
from typing import Any, Literal

import torch
from torch import nn

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.numerics.seeding import generator, linear_std, uniform
from moetool.runtime.modules.networks import SplitFFN
from moetool.runtime.modules.quantized_in_model import is_quantized

Quantization = Literal["none", "nf4", "int8"]

_OTHERWISE = ("Router", "GroupedLinear")  # linear layers that give something else than a product with their weight
_WITHOUT_A_CALL = "dt_proj"  # Mamba's, of which the weight is used


def frozen_linears(model: nn.Module) -> list[str]:
    """Names of the linear layers below decoder layers that nothing else trains."""
    split = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, SplitFFN))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_quantized(module) and not module.weight.requires_grad
        if any(part.isdigit() for part in name.split("."))
        if not name.startswith(split)  # whose neurons are computed a part at a time
        if not (type(module).__name__.endswith(_OTHERWISE) or name.endswith(_WITHOUT_A_CALL))
    ]


def add_lora(model: nn.Module, names: list[str], rank: int, alpha: float, seed: int = 0) -> None:
    """Add trainable factors of that rank, scaled by alpha / rank, to the named linear layers; their product is zero,
    and one of them is drawn as a fresh `nn.Linear` is."""
    from peft import LoraConfig, inject_adapter_in_model

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about transformers
        # In a model that it knows, peft takes linear layers of shared experts for those of the experts.
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=[f"0.{name}" for name in names])
        inject_adapter_in_model(config, nn.ModuleList([model]))
    for name in names:
        first = model.get_submodule(name).get_submodule("lora_A.default").get_parameter("weight")
        first.data.copy_(uniform((*first.shape,), linear_std(first.shape[1]), generator(seed, "lora", name)))
    for parameter in trained:
        parameter.requires_grad_(True)  # peft freezes everything else


def quantize_linears(model: nn.Module, names: list[str], kind: Quantization, device: torch.device) -> None:
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
    """Put ordinary linear layers back: the weights of the source, plus what their factors have learnt.

    Raises:
        InvalidInputError: a layer that was held quantized has another name in the checkpoint.
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, module in layers.items():
        base = module.get_base_layer()
        exact = _exact_weight(name, base, source)
        delta = module.get_delta_weight("default")
        _set_linear(model, name, exact + delta.to(exact), base.bias)
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
