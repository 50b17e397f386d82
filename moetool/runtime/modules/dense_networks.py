"""The feed-forward networks of a dense model's layers, taken out of them: moetool's modules are put in their place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moetool.architectures.dense import DenseArchitecture
from moetool.runtime.modules.insertion import path_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SpreadNetwork(nn.Module):
    """A feed-forward network whose parts lay in the decoder layer itself: `down(act(up))`."""

    def __init__(self, up: nn.Module, down: nn.Module, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act_fn = up, down, act_fn

    def forward(self, rows: Tensor) -> Tensor:
        """Compute `down(act(up(rows)))` for rows `[..., hidden]`, in the same shape."""
        return self.down(self.act_fn(self.up(rows)))


class Unowned:
    """Calls a module whose tensors belong to another one than the object that has this."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, rows: Tensor) -> Tensor:
        return self.module(rows)


def unowned(act_fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An activation function that adds no tensors to a module that has it."""
    return Unowned(act_fn) if isinstance(act_fn, nn.Module) and act_fn.state_dict() else act_fn


@dataclass(frozen=True)
class Taken:
    """The network of one layer.

    Attributes:
        path: its place in the model, where a module may be put instead.
        module: the network.
    """

    path: str
    module: nn.Module


def take(model: "PreTrainedModel", dense: DenseArchitecture, number: int) -> Taken:
    """The network of a layer; one that is spread over the layer is put together, and leaves identities behind wherever
    it was beside its entry."""
    path = path_in(model, dense.layer_prefix(number).removesuffix("."))
    place, layer = f"{path}.{dense.ffn}", model.get_submodule(path)
    if (spread := dense.spread) is None:
        return Taken(place, layer.get_submodule(dense.ffn))
    names = {role: name.removesuffix(".weight") for role, name in dense.weights.items()}
    act_fn = (
        getattr(layer, spread.activation) if spread.activation else layer.get_submodule(dense.ffn).intermediate_act_fn
    )
    network = SpreadNetwork(layer.get_submodule(names["up"]), layer.get_submodule(names["down"]), act_fn)
    for emptied in (spread.exit, spread.activation):
        if emptied is not None:
            layer.set_submodule(emptied, nn.Identity())
    return Taken(place, network)
