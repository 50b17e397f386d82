"""Learning rates: the default by what is trained, and those of scales, each of which moves many weights."""

from torch import nn
from torch.optim import Optimizer

from moetool.representations.base import Weight
from moetool.runtime.modules.pesc import Adapters
from moetool.runtime.modules.routers import trained_routers
from moetool.tune.options import LORA_RATE, TUNE_RATE, TuneOptions


def peak_rate(model: nn.Module, options: TuneOptions) -> float:
    """Peak of the learning rate's schedule: what was given, or the default for what is trained of a model.

    Low-rank factors and adapters begin with one side at zero, and need larger steps than weights.
    """
    if options.learning_rate is not None:
        return options.learning_rate
    added = [module for name, module in model.named_modules() if isinstance(module, Adapters) or "lora_" in name]
    small = {id(own) for module in (*added, *trained_routers(model)) for own in module.parameters()}
    trained = [own for own in model.parameters() if own.requires_grad]
    only_added = bool(added) and all(id(own) in small for own in trained)
    return LORA_RATE if options.train == "lora" or only_added else TUNE_RATE


def set_rate_of_scales(optimizer: Optimizer, model: nn.Module, times: float) -> None:
    """Give the scales of a model's codes groups of their own in an optimizer, without weight decay.

    Args:
        optimizer: that has no state yet.
        model: whose parameters it trains.
        times: how far a step moves what the codes stand for, where it moves weights by one. Codes of 8 bits are numbers
            up to 127, and their scales a hundredth of those of 2 bits.
    """
    rates = dict[int, float]()
    for module in model.modules():
        if isinstance(module, Weight) and isinstance(scales := getattr(module, "scales", None), nn.Parameter):
            rates[id(scales)] = times / module.scaled_size
    for group in [*optimizer.param_groups]:
        apart = dict[float, list[nn.Parameter]]()
        for parameter in (own for own in group["params"] if id(own) in rates):
            apart.setdefault(rates[id(parameter)], []).append(parameter)
        group["params"] = [own for own in group["params"] if id(own) not in rates]
        for rate, own in sorted(apart.items()):
            optimizer.add_param_group(group | {"params": own, "lr": group["lr"] * rate, "weight_decay": 0.0})
