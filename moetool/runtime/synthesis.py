"""Experts of a loaded model made dense once and for all, or left to be made from base and deltas as they run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from torch import nn

from moetool.architectures.base import by_name
from moetool.errors import UsageError
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.fused import fused_tensors
from moetool.runtime.modules.offloading import is_offloaded
from moetool.runtime.modules.shared_expert import SharedExpertOnBase

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Synthesis = Literal["auto", "load", "on-the-fly"]


@torch.no_grad()
def synthesize(model: "PreTrainedModel") -> "PreTrainedModel":
    """Replace every shared-base experts module by the native one with the matrices it stands for; returns the model.

    Faster to run where deltas are quantized or sparse, at the original model's size in memory. What it saves from then
    on is an ordinary checkpoint. Dynamic pruning of bases is left out: it has no dense form.

    Raises:
        UsageError: some of the experts are offloaded.
    """
    if offloaded := [name for name, module in _stored(model) if is_offloaded(module)]:
        raise UsageError(
            f"synthesize needs the weights in memory, but accelerate has offloaded {len(offloaded)} of the model's "
            f"expert layers to disk or to another memory, the first {offloaded[0]}. Load the model without device_map, "
            "or with one that offloads none of its layers; or export the checkpoint (moetool export), which needs "
            "memory for a few matrices only."
        )
    modules = list(model.named_modules())
    for name, module in modules:
        if isinstance(module, SharedExpertOnBase):
            model.set_submodule(name, _dense_shared_expert(module))
    for name, module in modules:
        if isinstance(module, SharedBaseExperts):
            model.set_submodule(name, dense_experts(module))
    entry: Any = getattr(model.config, "quantization_config", None)
    if getattr(entry, "mixture", None) is not None:
        entry.layers = {}
    elif entry is not None:
        del model.config.quantization_config
    return model


def _stored(model: "PreTrainedModel") -> Iterator[tuple[str, SharedBaseExperts]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SharedBaseExperts))


def dense_experts(module: SharedBaseExperts) -> nn.Module:
    """The native experts module of the same family, in the same dtype and on the same device."""
    with torch.device("meta"):
        native: Any = module.native_class(module.config)
    shape, like = module.layout.shape, module.down_proj
    for name, fused in fused_tensors(shape, module.dense, like.dtype, like.device):
        setattr(native, name, nn.Parameter(fused))
        if hasattr(module, f"{name}_bias"):
            setattr(native, f"{name}_bias", getattr(module, f"{name}_bias"))
    return native.train(module.training)


def _dense_shared_expert(module: SharedExpertOnBase) -> nn.Module:
    experts, native = module.experts, module.native
    for path, roles in by_name(module.names).items():
        linear: Any = native.get_submodule(path.removesuffix(".weight"))
        matrices = [experts.dense(experts.num_experts, role).to(experts.down_proj.dtype) for role in roles]
        linear.weight = nn.Parameter(torch.cat(matrices))
        if roles[0] in experts.layout.shape.biases:
            linear.bias = module.bias(roles[0])
    return native.train(module.training)


def apply_synthesis(model: "PreTrainedModel", choice: Synthesis) -> bool:
    """Make the experts dense if that is asked for, or (`auto`) if it pays and they fit; returns whether it was done.

    It pays where deltas are not simply low-rank, and they fit if they take at most half of the free memory; those
    that are offloaded do not.
    """
    modules = [module for _, module in _stored(model)]
    if choice == "on-the-fly" or not modules:
        return False
    if choice == "auto":
        if any(is_offloaded(module) for module in modules):
            return False
        cheap = all(form.is_cheap for module in modules for _, _, form in module.layout.deltas())
        if cheap or any(module.layout.dynamic_channels for module in modules):
            return False
        needed = sum(
            shape.experts * shape.expert_parameters * module.down_proj.element_size()
            for module in modules
            for shape in [module.layout.shape]
        )
        device = modules[0].down_proj.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        if needed > free / 2:
            return False
    synthesize(model)
    return True
