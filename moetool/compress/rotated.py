"""Which rotations a layer's inputs get."""

from moetool.architectures import MoEShape, Role
from moetool.errors import UsageError
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
