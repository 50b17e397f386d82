"""Sparse interpolated experts (SIMoE; Chen et al., 2025): every linear layer of a frozen model, plus one shared
delta whose input channels are weighed by a mixture of masks.

`y = W x + W_δ ((Σ_i α_i z_i) ⊙ x)`. The masks z_i are the experts, hard-concrete while they are trained. α comes
from a router that sees what the frozen model makes of the prompt's last token: one α for all layers and all tokens of
an example, whatever the answer. After training only channels that some mask leaves open stay. Names on disk are in
`format/kinds/simoe.py`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.dense import DenseArchitecture
from moetool.errors import InvalidInputError
from moetool.format.kinds.simoe import SimoeSpec
from moetool.numerics.hard_concrete import median_gate, open_probability, sampled_gate
from moetool.runtime.modules.insertion import CustomLayer, add_placeholder, path_in
from moetool.runtime.modules.linear import TokenLinear
from moetool.runtime.modules.simoe_mixing import Interpolation, mix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InterpolatedLinear(CustomLayer):
    """A frozen linear layer with a delta that all experts share, masked by each of them (SIMoE)."""

    is_efficient: ClassVar[bool] = True
    kept_wide: ClassVar[tuple[str, ...]] = ("log_phi",)
    columns: Tensor
    fixed_gates: Tensor

    def __init__(self, linear: nn.Linear, interpolation: Interpolation, channels: int | None) -> None:
        """Build around `linear`; `channels` is how many stay after training, `None` while masks are trained."""
        super().__init__()
        self.linear = linear
        self._kind = type(linear)
        self._interpolation = (interpolation,)  # in a tuple, so that it is not registered here
        like, experts = linear.weight, interpolation.experts
        add_placeholder(self, "weight", like)
        width = linear.in_features if channels is None else channels
        self.delta = nn.Parameter(like.new_empty(linear.out_features, width))
        if channels is None:
            self.log_phi = nn.Parameter(torch.empty(experts, width, dtype=torch.float32, device=like.device))
        else:
            self.register_buffer("columns", torch.zeros(width, dtype=torch.int32, device=like.device))
            self.index_limits = {"columns": linear.in_features}
            self.register_buffer("fixed_gates", like.new_zeros(experts, width))

    @property
    def trains_masks(self) -> bool:
        """Whether the masks are still parameters, as in training, and not fixed yet."""
        return "log_phi" in self._parameters

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        yield from self.parameters(recurse=False)

    @property
    def in_features(self) -> int:
        """Number of inputs of the linear layer, under the name that torch gives it."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """Number of outputs of the linear layer, under the name that torch gives it."""
        return self.linear.out_features

    @property
    def bias(self) -> Tensor | None:
        """The bias `[out]` of the linear layer; `None` if it has none."""
        return self.linear.bias

    def gates(self, *, sampled: bool = False) -> Tensor:
        """The masks `[experts, channels]` of all experts, between 0 and 1: drawn with `sampled`, else their medians."""
        if not self.trains_masks:
            return self.fixed_gates
        return sampled_gate(self.log_phi) if sampled else median_gate(self.log_phi)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer with the delta that the current mixture of experts makes: `[batch, length, in]` → `[batch,
        length, out]`."""
        interpolation = self._interpolation[0]
        if (weight := interpolation.folded_weight(self)) is not None:
            return F.linear(inputs, weight, self.bias)
        outputs = self.linear(inputs)
        mixture = interpolation.mixed(self, inputs)
        if mixture is None:
            return outputs
        chosen = inputs if self.trains_masks else inputs.index_select(-1, self.columns.long())
        return outputs + F.linear(chosen * mixture, self.delta)

    @property
    def is_plain(self) -> bool:
        """Whether `W x` is all that the layer computes, and W is there: nothing has adapted, quantized or offloaded it
        since."""
        return type(self.linear) in (self._kind, TokenLinear) and not self.linear.weight.is_meta

    def versions(self) -> tuple[object, ...]:
        """What changes with the weights or masks, or with where or in which dtype they are."""
        tensors = (self.linear.weight, self.delta, self.log_phi if self.trains_masks else self.fixed_gates)
        return tuple((t.device, t.dtype, t.is_inference() or int(t._version)) for t in tensors)

    @torch.no_grad()
    def prune(self) -> None:
        """Leave out the channels that no mask leaves open, and keep the masks as they are."""
        gates = self.gates()
        columns = (gates != 0).any(0).nonzero().flatten()
        self.delta = nn.Parameter(self.delta[:, columns].contiguous())
        del self.log_phi
        self.register_buffer("columns", columns.int())
        self.register_buffer("fixed_gates", gates[:, columns].to(self.delta.dtype))

    @torch.no_grad()
    def folded(self, alpha: Tensor) -> Tensor:
        """The dense weight `[out, in]` for one α `[experts]`: the mixture folded in."""
        weight, mixture = self.linear.weight, mix(alpha, self.gates()).to(self.delta.dtype)
        if self.trains_masks:
            return weight.addcmul(self.delta, mixture)
        return weight.index_add(1, self.columns.long(), self.delta * mixture)  # int32 is 15 times slower


def sites(model: nn.Module) -> dict[str, InterpolatedLinear]:
    """Find the interpolated layers of a model, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, InterpolatedLinear)}


def open_share(model: nn.Module) -> Tensor:
    """Expected share of mask elements that are not zero, differentiable."""
    masks = [site.log_phi for site in sites(model).values()]
    total = torch.stack([open_probability(mask).sum() for mask in masks]).sum()
    return total / sum(mask.numel() for mask in masks)


@torch.no_grad()
def closed_share(model: nn.Module) -> float:
    """Share of all mask elements whose median is zero, over all layers and experts."""
    masks = [site.gates() for site in sites(model).values()]
    return sum(int((mask == 0).sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def overlap_penalty(model: nn.Module) -> Tensor:
    """Frobenius norm of what masks of different experts have in common, `‖Z Zᵀ − diagonal‖` over all layers (raw
    counts of channels)."""
    products = torch.stack([(gates := site.gates()) @ gates.T for site in sites(model).values()]).sum(0)
    return (products - torch.diag(products.diagonal())).norm()


def insert(model: "PreTrainedModel", dense: DenseArchitecture, spec: SimoeSpec) -> None:
    """Wrap every linear layer of the decoder layers in an `InterpolatedLinear`.

    Raises:
        InvalidInputError: the family's layers are not torch's linear layers.
    """
    if dense.is_transposed:
        raise InvalidInputError(f"SIMoE takes torch's linear layers, and {dense.name} has others (Conv1D).")
    prefix, _, _ = dense.layer.partition(".{layer}")
    layers = path_in(model, prefix)
    path, _, _ = layers.rpartition(".")
    decoder = model.get_submodule(path)
    linears = [
        (f"{prefix}.{name}", f"{layers}.{name}", module)
        for name, module in model.get_submodule(layers).named_modules()
        if isinstance(module, nn.Linear)
    ]
    like = linears[0][2].weight
    interpolation = Interpolation(
        model.config.hidden_size,
        spec.experts,
        spec.router_width,
        like,
        trains_masks=spec.channels is None,
        sparsity=spec.sparsity,
    )
    decoder.add_module("interpolation", interpolation)
    decoder.register_forward_pre_hook(interpolation.before, with_kwargs=True)
    decoder.register_forward_hook(interpolation.after)
    for name, place, linear in linears:
        left = None if spec.channels is None else spec.channels[name]
        model.set_submodule(place, InterpolatedLinear(linear, interpolation, left))
