"""Experts of a loaded model made dense once and for all, or left to be made from base and deltas as they run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from moetool.architectures.shape import by_name
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import ResourceError, UsageError
from moetool.format.kinds import kinds
from moetool.kernels.products import problem
from moetool.runtime.loading import run_experts_of_any_width
from moetool.runtime.memory import free_bytes, returning_memory
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.fused import fused_tensors, without_tensors
from moetool.runtime.modules.given_model import check_loaded
from moetool.runtime.modules.offloading import is_offloaded
from moetool.runtime.modules.quantized_in_model import dense_modules, quantized_modules
from moetool.runtime.modules.shared_expert import SharedExpertOnBase

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Synthesis = Literal["auto", "load", "on-the-fly"]


@torch.no_grad()
def synthesize(model: "PreTrainedModel") -> "PreTrainedModel":
    """Replace every shared-base experts module by the native one with the matrices it stands for, and what is quantized
    beside them; returns the model.

    Faster to run where deltas are quantized or sparse, at the original model's size in memory. What it saves from then
    on is an ordinary checkpoint, or one of moetool's custom modules if it has some (adapters, masks, neurons as
    experts): these stay as they are. Dynamic pruning of bases is left out: it has no dense form.

    Raises:
        UsageError: some of the experts are offloaded, or it is no loaded model.
    """
    check_loaded(model, "synthesize")
    if offloaded := [name for name, module in (*_stored(model), *quantized_modules(model)) if is_offloaded(module)]:
        raise UsageError(
            f"synthesize needs the weights in memory, but accelerate has offloaded {len(offloaded)} of the model's "
            f"compressed modules to disk or to another memory, the first {offloaded[0]}. Load the model without "
            "device_map, or with one that offloads none of its layers; or export the checkpoint (moetool export), "
            "which needs memory for a few matrices only."
        )
    for kind, made in ((SharedExpertOnBase, _dense_shared_expert), (SharedBaseExperts, dense_experts)):
        # By name: a list of the modules would keep what is stored until the last is replaced.
        names = [name for name, module in model.named_modules() if isinstance(module, kind)]
        with returning_memory():
            for name in names:
                model.set_submodule(name, made(model.get_submodule(name)))
    dense_modules(model)
    run_experts_of_any_width(model)
    entry: Any = getattr(model.config, "quantization_config", None)
    if any(getattr(entry, key, None) is not None for key in kinds()):
        entry.layers = {}
    elif entry is not None:
        del model.config.quantization_config
    return model


def _stored(model: "PreTrainedModel") -> Iterator[tuple[str, SharedBaseExperts]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SharedBaseExperts))


def dense_experts(module: SharedBaseExperts) -> nn.Module:
    """The native experts module of the same family, in the same dtype and on the same device."""
    native, shape, like = without_tensors(module.native), module.layout.shape, module.down_proj
    for name, fused in fused_tensors(shape, module.dense, like.dtype, like.device, module.native_layout):
        setattr(native, name, nn.Parameter(fused))
        if hasattr(module, f"{name}_bias"):
            setattr(native, f"{name}_bias", getattr(module, f"{name}_bias"))
    return native.train(module.training)


def _dense_shared_expert(module: SharedExpertOnBase) -> nn.Module:
    experts, native = module.experts, module.native
    for path, roles in by_name(module.names).items():
        linear = native.get_submodule(path.removesuffix(".weight"))
        matrices = [experts.dense(experts.num_experts, role).to(experts.down_proj.dtype) for role in roles]
        linear.weight = nn.Parameter(torch.cat(matrices))
        if roles[0] in experts.layout.shape.biases:
            linear.bias = module.bias(roles[0])
    return native.train(module.training)


@dataclass(frozen=True)
class SynthesisChoice:
    """The way a model's experts are computed, and the reason for it.

    Attributes:
        chosen: `load` if they are dense now, `on-the-fly` if they are made of base and deltas as they run.
        reason: in words.
        needed: bytes that dense experts take, 0 if nothing is compressed.
        free: bytes that were free for them.
    """

    chosen: Literal["load", "on-the-fly"]
    reason: str
    needed: int
    free: int


def synthesis_bytes(model: "PreTrainedModel") -> int:
    """Bytes that what `synthesize` makes takes, on whatever device; 0 for a model without compressed modules. Peak: one
    layer as it is stored more, since each is let go when its experts are made."""
    matrices = {own.stored: math.prod(own.stored.shape) for _, own in quantized_modules(model)}  # what is tied is one
    return sum(numbers * stored.scales.element_size() for stored, numbers in matrices.items()) + sum(
        module.layout.stored_experts * module.layout.shape.expert_parameters * module.down_proj.element_size()
        for _, module in _stored(model)
    )


def choose_synthesis(model: "PreTrainedModel", asked: Synthesis, *, few_tokens: bool = False) -> SynthesisChoice:
    """Decide how experts are computed, without changing the model (`apply_synthesis` does).

    By what was measured (scripts/benchmarks/results/runtime.md), not by the clock: the same command is to take the same
    way every time. Few tokens at a time are faster with experts as they are stored, if kernels read them. Many are
    faster with dense ones where deltas are not simply low-rank. Dense ones fit if they take at most half of the free
    memory; those that are offloaded do not.
    """
    modules = [module for _, module in _stored(model)]
    needed = synthesis_bytes(model)
    free = free_bytes(modules[0].down_proj.device if modules else None)

    def choice(chosen: Literal["load", "on-the-fly"], reason: str) -> SynthesisChoice:
        return SynthesisChoice(chosen, reason, needed, free)

    if not modules:
        return choice("on-the-fly", "no experts are stored as deltas")
    if asked != "auto":
        return choice(asked, "asked for")
    if any(is_offloaded(module) for module in modules):
        return choice("on-the-fly", "some experts are offloaded")
    if any(module.layout.dynamic_channels for module in modules):
        return choice("on-the-fly", "semi-dynamic pruning has no dense form")
    if all(form.is_cheap for module in modules for _, _, form in module.layout.deltas()):
        return choice("on-the-fly", "low-rank deltas run as they are")
    if few_tokens and not (reason := problem(modules[0].down_proj.device)):
        return choice("on-the-fly", "kernels multiply few tokens with them as they are stored, faster than dense ones")
    told = f"dense experts take {format_bytes(needed)}, {format_bytes(free)} are free"
    if needed > free / 2:
        return choice("on-the-fly", f"{told}, of which they may take half")
    if few_tokens:
        told += f"; there are no kernels: {reason}"
    return choice("load", told)


def apply_synthesis(model: "PreTrainedModel", asked: Synthesis, *, few_tokens: bool = False) -> SynthesisChoice:
    """Make the experts of a model dense if that is asked for, or (`auto`) if it pays and they fit; returns what was
    chosen and why. It pays less where passes have `few_tokens`, as in generating.

    Raises:
        UsageError: it is asked for, and some of the experts are offloaded.
        ResourceError: it is asked for, and they do not fit.
    """
    choice = choose_synthesis(model, asked, few_tokens=few_tokens)
    if choice.chosen == "load":
        if choice.needed > choice.free:
            raise ResourceError(
                f"Dense experts take {format_bytes(choice.needed)} of memory, {format_bytes(choice.free)} are free. "
                "Leave them as they are stored (--synthesize on-the-fly)."
            )
        synthesize(model)
    return choice
