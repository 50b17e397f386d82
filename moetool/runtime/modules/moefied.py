"""A dense model whose feed-forward networks are split into experts of neurons: built, and told how many to use."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from moetool.architectures.dense import DenseArchitecture
from moetool.architectures.dense.networks import network_in
from moetool.architectures.shape import Role
from moetool.errors import UsageError
from moetool.format.kinds.moefied import MoefiedSpec
from moetool.runtime.modules.dense_networks import take, unowned
from moetool.runtime.modules.given_model import check_loaded
from moetool.runtime.modules.led_neurons import LedNeurons
from moetool.runtime.modules.neuron_experts import NeuronExperts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_keep(model: "PreTrainedModel", keep: float) -> None:
    """Let every token of a moefied model use that share of the experts, now and when it is saved.

    Raises:
        UsageError: the model is not loaded or not moefied, or the share is no number or less than half an expert.
    """
    check_loaded(model, "set_keep")
    moefied = [module for module in model.modules() if isinstance(module, NeuronExperts)]
    if not moefied:
        raise UsageError("--keep: this model is not moefied, so every token needs all of it.")
    if isinstance(keep, bool) or not isinstance(keep, int | float):
        raise UsageError(f"keep is {keep!r}: it must be a number above 0 and at most 1.")
    for module in moefied:
        try:
            module.set_keep(keep)
        except ValueError as error:
            raise UsageError(f"{error}.") from error
    entry = model.config.quantization_config
    spec = MoefiedSpec.from_config(getattr(entry, MoefiedSpec.key))
    setattr(entry, MoefiedSpec.key, spec.keeping(keep).to_config())


def insert(model: "PreTrainedModel", dense: DenseArchitecture, spec: MoefiedSpec) -> None:
    """Replace the feed-forward networks of the layers in `spec` by networks split into experts of neurons."""
    for number in spec.layers:
        taken = take(model, dense, number)
        network = network_in(taken.module)
        if network.is_transposed:
            _turn(taken.module, network.linear)
        down = taken.module.get_submodule(network.linear["down"])
        act_fn, lead = unowned(network.activation), spec.lead(number)
        hidden, intermediate = down.get_parameter("weight").shape
        build = NeuronExperts if lead is None else LedNeurons
        experts = build(taken.module, network.linear, act_fn, hidden, intermediate, spec, dense.placeholder, lead)
        experts.dropout, experts.factor, experts.adds = network.dropout, network.factor, network.adds
        model.set_submodule(taken.path, experts)


def _turn(ffn: nn.Module, names: Mapping[Role, str]) -> None:
    """Put empty linear layers in the place of a network's `Conv1D`s: the files hold matrices `[out, in]`."""
    for path in names.values():
        old = ffn.get_submodule(path).get_parameter("weight")
        entering, leaving = old.shape
        linear = nn.Linear(entering, leaving, device=old.device, dtype=old.dtype)
        ffn.set_submodule(path, linear)
