"""A mixture of whole feed-forward networks: how many experts, in which layers, and what stands beside them."""

from dataclasses import dataclass
from typing import Any, Literal

Shared = Literal["none", "half", "xft", "med"]


def routed_scale(shared: str, *, native: bool) -> float:
    """What the down matrices of routed experts are multiplied by: ½ beside a shared expert that gives half of the
    output, in a family of transformers, which has no word for it."""
    return 0.5 if native and shared == "half" else 1.0


@dataclass(frozen=True)
class Mixture:
    """The shape of a mixture of experts to be made.

    Attributes:
        experts: routed experts per layer, pieces of an FFN counted one by one.
        top_k: of them per token.
        intermediate: width of one expert.
        layers: which decoder layers become mixtures, ascending.
        of: number of decoder layers.
        shared: what the original FFN does beside them. `none`: nothing. `half`: it gives half of the output, the routed
            experts the other half. `med`: it is added to un-renormalised routing (Med-MoE), which does not preserve the
            model. `xft`: it is weighted by what the largest routing probability leaves (XFT).
    """

    experts: int
    top_k: int
    intermediate: int
    layers: tuple[int, ...]
    of: int
    shared: Shared = "none"

    @property
    def dense_layers(self) -> list[int]:
        """The layers that stay as they are."""
        return [layer for layer in range(self.of) if layer not in self.layers]

    @property
    def features(self) -> tuple[str, ...]:
        """What it asks of a family, by the names of `FEATURES`."""
        partial = ("dense_layers",) if self.dense_layers else ()
        return partial if self.shared == "none" else (*partial, f"shared_{self.shared}")

    def to_config(self) -> dict[str, Any]:
        """What `config.json` says of it, where its family has no words of its own."""
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "intermediate": self.intermediate,
            "layers": list(self.layers),
            "shared": self.shared,
        }
