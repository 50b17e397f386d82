"""Choice of the parameters that `moetool tune` trains: all, the experts and their routers, or none for adapters
alone."""

import math
from collections import Counter
from typing import TYPE_CHECKING, Literal

from torch import nn

from moetool.architectures.described import language_model_in
from moetool.architectures.layers import decoder_layer
from moetool.errors import UsageError
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import CustomLayer, is_placeholder
from moetool.runtime.modules.quantized import QuantizedLinear
from moetool.runtime.modules.quantized_in_model import quantized_modules
from moetool.runtime.modules.routers import trained_routers
from moetool.runtime.modules.simoe_mixing import interpolation_of
from moetool.tune.lora import frozen_linears
from moetool.tune.options import TuneOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Train = Literal["auto", "all", "experts", "lora", "none"]


def is_efficient(model: nn.Module) -> bool:
    """Whether a model's experts are few parameters beside the weights that all of them share."""
    return any(
        isinstance(module, SharedBaseExperts) or (isinstance(module, CustomLayer) and module.is_efficient)
        for module in model.modules()
    )


def has_experts(model: nn.Module) -> bool:
    """Whether a model has routers, or experts in one of moetool's own modules."""
    own = (CustomLayer, SharedBaseExperts)
    return bool(trained_routers(model)) or any(isinstance(module, own) for module in model.modules())


def choose_for(model: "PreTrainedModel", options: TuneOptions) -> list[str]:
    """Let what the options of `tune` train require gradients, `--train task-experts` and low-rank updates of `--train
    lora` left out, and nothing else.

    Args:
        model: it may be on the meta device.
        options: of the command.

    Returns:
        Names of the linear layers that stay as they are, to be adapted or to be held quantized.

    Raises:
        UsageError: the model has nothing of the kind.
    """
    train: Train = "auto" if options.train == "task-experts" else options.train
    asked = "--train lora" if train == "lora" else "--lora-rank"
    if options.rank is not None and interpolation_of(model) is not None:
        raise UsageError(f"{asked}: interpolated experts (SIMoE) are deltas to a model that stays as it is.")
    coded = sum(1 for _ in quantized_modules(model))
    if options.rank is not None and coded:
        raise UsageError(
            f"{asked}: {coded} linear layers and embeddings of this model are stored as codes, which factors "
            "cannot be merged into. Train experts and routers (--train experts), or what export --format "
            "dense-experts writes of it."
        )
    if (options.lora_rank is not None or options.quantize_base != "none") and train == "auto":
        train = "none" if options.lora_rank is not None and not has_experts(model) else "experts"
    choose(model, train, freeze_shared=options.freeze_shared)
    frozen = frozen_linears(model)
    if not frozen and (options.lora_rank is not None or options.quantize_base != "none") and train != "lora":
        asked = "--lora-rank" if options.lora_rank is not None else "--quantize-base"
        raise UsageError(
            f"{asked}: no linear layer is left that is not trained itself, or stored as codes. --train lora adapts "
            "matrices of other kinds, such as GPT-2's, too."
        )
    return frozen


def choose(model: "PreTrainedModel", train: Train, *, freeze_shared: bool) -> int:
    """Let the parameters that are to be trained require gradients, and no others; returns the number of their elements.

    Raises:
        UsageError: the model has nothing of the kind.
    """
    stored = [module for module in model.modules() if isinstance(module, SharedBaseExperts)]
    if freeze_shared and all(module.layout.is_baseless for module in stored):
        raise UsageError("--freeze-shared: this model's experts are no deltas to a base.")
    if train == "all" and interpolation_of(model) is not None:
        raise UsageError("--train all: interpolated experts (SIMoE) are deltas to a model that stays as it is.")
    if train == "none" or (train == "lora" and not has_experts(model)):
        model.requires_grad_(False)
    elif train in ("experts", "lora") or (train == "auto" and is_efficient(model)):
        _experts_only(model, in_full=train != "lora")
    if freeze_shared:
        for parameter in (own for module in stored for own in module.base_parameters()):
            parameter.requires_grad_(False)
    for parameter in model.parameters():
        if is_placeholder(parameter) or not parameter.is_floating_point():
            parameter.requires_grad_(False)
    return trained_parameters(model)


def trained_parameters(model: nn.Module) -> int:
    """Number of elements in all parameters that require gradients."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def decoded_numbers(model: nn.Module) -> Counter[str]:
    """Numbers that a model decodes from codes for all tokens and keeps for the way back, by layer (`decoder_layer`):
    matrices of linear layers beside the experts, and of bases; where scales are trained, also what these multiply."""
    found = Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            shapes, scales = [module.matrix_shape()], [*module.stored.parameters()]
        elif isinstance(module, SharedBaseExperts):
            layout, scales = module.layout, [*module.base_parameters()]
            shapes = [layout.base_shape(role) for role, _ in layout.compact_bases() if layout.has_base(role)]
        else:
            continue
        times = 1 + any(parameter.requires_grad for parameter in scales)
        found[decoder_layer(name)] += times * sum(map(math.prod, shapes))
    return found


def decoded_at_once(model: nn.Module) -> int:
    """Numbers that are made of the codes of the largest expert while it is trained: what scales multiply, matrices, and
    gradients of these. Those of one expert are in memory at a time."""
    return max(
        (
            3 * module.layout.shape.expert_parameters
            for module in model.modules()
            if isinstance(module, SharedBaseExperts)
            and any(name.endswith("codes") for name, _ in module.named_buffers())
        ),
        default=0,
    )


def _experts_only(model: nn.Module, *, in_full: bool) -> None:
    """Let routers and experts of the language model require gradients, those that are stored `in_full` or not."""
    if not has_experts(model):
        raise UsageError("--train experts: this model has none. Upcycle it first.")
    routers = trained_routers(model)
    custom = [module for module in model.modules() if isinstance(module, CustomLayer)]
    model.requires_grad_(False)
    for name, module in language_model_in(model)[1].named_modules():
        if module in routers or isinstance(module, SharedBaseExperts) or (in_full and name.endswith(".experts")):
            module.requires_grad_(True)
    for module in custom:
        if in_full or module.is_efficient:
            for parameter in module.expert_parameters():
                parameter.requires_grad_(True)
