"""MoE layers of whole feed-forward networks: how many experts, in which layers, and what stands beside them.

A target family of transformers has its own words for it. A model of any other family is written as what it was, with
its feed-forward networks `{ffn}` replaced: on disk `{ffn}.gate.weight`, `{ffn}.experts.gate_up_proj` (`up_proj` without
gates), `{ffn}.experts.down_proj`, the same with `_bias` at the end, and `{ffn}.shared_expert.`.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from moetool.architectures.dense import DenseArchitecture
from moetool.architectures.shape import MoEShape, Role, fused_name
from moetool.format.fields import Count, LayerCount, Layers
from moetool.format.kinds.base import RoutedModule, Shapes, network_tensors

Shared = Literal["none", "half", "xft", "med"]

ROUTER = "gate.weight"
SHARED = "shared_expert"


def routed_scale(shared: str, *, native: bool) -> float:
    """Factor on the down matrices of routed experts.

    It is ½ beside a shared expert that gives half of the output, in a family of transformers: its config cannot say so.
    """
    return 0.5 if native and shared == "half" else 1.0


def fused_names(roles: Sequence[Role]) -> dict[Role, str]:
    """Names of the experts' matrices, relative to the block. Their biases have the same, with `_bias` at the end."""
    return {role: f"experts.{fused_name(group)}" for group in (roles[:-1], roles[-1:]) for role in group}


class MoESpec(RoutedModule):
    """The shape of an MoE model to be made.

    Attributes:
        experts: routed experts per layer, pieces of an FFN counted one by one.
        top_k: of them per token.
        intermediate: width of one expert.
        layers: which decoder layers become MoE layers, ascending.
        shared: what the original FFN does beside them. `none`: nothing. `half`: it gives half of the output, the routed
            experts the other half. `med`: it is added to un-renormalised routing (Med-MoE), which does not preserve the
            model. `xft`: it is weighted by what the largest routing probability leaves (XFT).
        of: number of decoder layers.
        hidden: width of the model.
        roles: an expert's matrices, in order.
        biases: those with a bias.
    """

    name: ClassVar[str] = "moe"
    key: ClassVar[str] = "mixture"
    what: ClassVar[str] = "an MoE model made of a dense model's feed-forward networks"
    made: ClassVar[str] = "is an MoE model already: moetool upcycled it"
    title: ClassVar[str] = "moetool's MoE layers"

    intermediate: Count
    layers: Layers
    shared: Shared
    of: LayerCount
    hidden: Count
    roles: tuple[Role, ...]
    biases: tuple[Role, ...]

    @property
    def rule(self) -> str:
        return "softmax over all experts, top-k, renormalized"

    @property
    def shape(self) -> MoEShape:
        """Number and widths of the experts, their roles and biases, alike in every MoE layer."""
        return MoEShape(self.experts, self.top_k, self.hidden, self.intermediate, self.roles, self.biases)

    @property
    def dense_layers(self) -> list[int]:
        """Numbers of the decoder layers that keep their dense feed-forward network."""
        return [layer for layer in range(self.of) if layer not in self.layers]

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the module asks of a family, by the names of `FEATURES`."""
        partial = ("dense_layers",) if self.dense_layers else ()
        return partial if self.shared == "none" else (*partial, f"shared_{self.shared}")

    def told(self) -> dict[str, object]:
        """The fields that `moetool.json` records of an upcycled model: number and width of experts, layers, shared
        expert."""
        return self.model_dump(mode="json", include={"experts", "top_k", "intermediate", "layers", "shared"})

    def among(self, layers: int) -> tuple[int, ...]:
        return self.layers

    def check(self, dense: DenseArchitecture, layers: int | None, hidden: int | None) -> None:
        super().check(dense, layers, hidden)
        biases = list(self.biases)
        if layers is not None and self.of != layers:
            raise self.refusal(f"of is {self.of}, and the model has {layers} layers")
        if hidden is not None and self.hidden != hidden:
            raise self.refusal(f"hidden is {self.hidden}, and the model's hidden size {hidden}")
        if self.roles != dense.roles:
            raise self.refusal(f"roles is {list(self.roles)}, and a {dense.name} has {list(dense.roles)}")
        for group in (dense.roles[:-1], dense.roles[-1:]):
            if 0 < sum(role in biases for role in group) < len(group):
                raise self.refusal(f"biases is {biases}: {' and '.join(group)} have both a bias or none")
        if len(set(biases)) < len(biases) or not {*biases} <= {*dense.roles}:
            raise self.refusal(f"biases is {biases}, not some of {list(dense.roles)}")

    def moved(self, dense: DenseArchitecture, shapes: Shapes) -> dict[str, str]:
        found = {name: name for name in shapes}
        for layer in self.layers:
            for name, inside in network_tensors(dense, layer, shapes).items():
                if self.shared != "none":
                    found[name] = f"{dense.ffn_prefix(layer)}{SHARED}.{inside}"
                elif inside not in dense.kept:
                    del found[name]
        return found

    def new(self, dense: DenseArchitecture, shapes: Shapes) -> set[str]:
        parts = tuple(dense.ffn_prefix(layer) + part for layer in self.layers for part in (ROUTER, "experts."))
        return {name for name in shapes if name.startswith(parts)}

    def idle(self, dense: DenseArchitecture, shapes: Shapes) -> int:
        expert = self.shape.expert_parameters + self.shape.bias_parameters
        return len(self.layers) * (self.experts - self.top_k) * expert


KIND = MoESpec
