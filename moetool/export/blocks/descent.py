"""Codes and scales of blocks, moved one after the other to where the output of a matrix loses least.

What is lost is tr(E G E^T) for errors E and the Gram matrix G of the inputs. As a function of one scale, minimum or
code alone that is a parabola, whose lowest point is known from the error's image E G. Of a span of some blocks it is
taken from the errors of all inputs; within the span it follows every change (`compiled_blocks`, `plain_descent`).
Nothing is ever made worse. One sweep takes as much work as one product with G.
"""

from dataclasses import dataclass

from torch import Tensor

from moetool.export.blocks import compiled_blocks
from moetool.export.blocks.blocked import Blocked
from moetool.export.blocks.plain_descent import descend

_SPAN = 256  # inputs


@dataclass
class Descent:
    """A matrix on its way.

    Attributes:
        inputs: `[in, out]` fp32, what blocks are to stand for.
        blocked: these blocks.
        gram: `[in, in]` fp32, of the inputs, damped.
    """

    inputs: Tensor
    blocked: Blocked
    gram: Tensor

    def __post_init__(self) -> None:
        self._errors = self.inputs - self.blocked.decoded()

    def sweep(self) -> None:
        """Improve the codes and scales of all blocks and groups once, one after the other."""
        own, numbers = self.blocked, self.blocked.kind.numbers
        step = max(1, _SPAN // numbers)
        for first in range(0, len(own.d), step):
            last = min(first + step, len(own.d))
            part, span = slice(first * numbers, last * numbers), own.span(first, last)
            image = self.gram[part] @ self._errors
            if compiled_blocks.runs_on(own.kind, image):
                compiled_blocks.descend(own.kind, span.numbers, self.gram[part, part], image)
            else:
                descend(span, self.gram[part, part], image)
            self._errors[part] = self.inputs[part] - span.decoded()

    def lost(self) -> Tensor:
        """Squared error at every output on the calibration inputs, `[out]`."""
        return (self.gram @ self._errors).mul_(self._errors).sum(0)

    def shares(self) -> Tensor:
        """How much of each output's squares points where the original did, `[out]`: 1 where nothing is lost."""
        image = self.gram @ self.inputs
        whole, lost = (image * self.inputs).sum(0), image.mul_(self._errors).sum(0)
        return (1 - lost / whole).nan_to_num(1.0)
