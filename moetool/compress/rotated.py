"""What codes of rotated matrices are chosen by: everything as it is where inputs are rotated."""

import torch
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.input_grams import InputGramCollector
from moetool.calibration.peers import Owned
from moetool.checkpoint.experts import Weights
from moetool.compress.base.layer_base import LayerBase
from moetool.compress.delta import Deltas
from moetool.errors import UsageError
from moetool.format.layout import LayerLayout
from moetool.numerics.counter import key
from moetool.numerics.rotation import Rotation

_LEAST = 8  # inputs that have to be mixed with each other for that to be worth a product


def seeds(shape: MoEShape, layer: int, seed: int) -> dict[Role, int]:
    """Of the rotations of a layer's inputs, by role: one for gate and up, one for down.

    Raises:
        UsageError: a width cannot be cut into blocks that are powers of two.
    """
    for role in shape.roles:
        turn = Rotation(shape.matrix(role)[1], 0)
        if turn.block < _LEAST:
            raise UsageError(
                f"--rotate mixes blocks of inputs by powers of two: of the {turn.width} inputs of {role}, "
                f"blocks of {turn.block} are all that fit, and at least {_LEAST} are needed."
            )
    return {role: key(seed, "rotation", layer, shape.group(role)[0]) >> 33 for role in shape.roles}


class RotatedGrams(InputGramCollector):
    """Second moments of inputs that are rotated as the layout says, if it does."""

    def __init__(
        self, layout: LayerLayout, device: torch.device, owned: Owned | None = None, at_once: int | None = None
    ) -> None:
        super().__init__(layout.shape, device, owned, at_once)
        self._layout = layout

    def gram(self, expert: int, role: Role) -> Tensor:
        found, turn = super().gram(expert, role), self._layout.turning(role)
        return found if turn is None else turn.gram(found)


class RotatedDeltas(Deltas):
    """Deltas to no base, as they are multiplied with rotated inputs."""

    def __init__(self, weights: Weights, base: LayerBase, device: torch.device, layout: LayerLayout) -> None:
        super().__init__(weights, base, device)
        self._layout = layout

    def of(self, role: Role, expert: int) -> Tensor:
        found, turn = super().of(role, expert), self._layout.turning(role)
        return found if turn is None else turn(found)
