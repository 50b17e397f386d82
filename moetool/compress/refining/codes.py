"""Refinement of one expert at a time: its codes and scales move, through the `Trainable` of each representation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.compress.refining.refinement import ExpertMatrices, MovingExperts, RefinableExperts
from moetool.numerics.rotation import Rotation
from moetool.representations import Representation
from moetool.representations.trainable import Pace, Trainable

BATCH_TOKENS = 512  # tokens per step
_PACE = Pace(codes=0.01, scales=0.006)  # of the first step


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """One matrix `[out, in]` in its stored form, as refinement sees it.

    Attributes:
        form: the representation of `tensors`.
        tensors: the stored tensors, by name.
        matrix: the matrix or delta that the tensors were made of, fp32.
        base: the matrix that the tensors are a delta to, fp32; `None` if they are the whole matrix.
        rotation: the rotation of inputs that the tensors are multiplied with, if any. `matrix` is rotated, too, and
            `base` is not.
    """

    form: Representation
    tensors: Mapping[str, Tensor]
    matrix: Tensor
    base: Tensor | None
    rotation: Rotation | None = None

    @property
    def _shape(self) -> tuple[int, int]:
        rows, columns = self.matrix.shape
        return rows, columns

    def trainable(self) -> Trainable | None:
        """The tensors as gradients can move them; `None` if the representation has no way."""
        return self.form.trainable(self.tensors, self._shape, self.matrix)

    def value(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, for inputs that are not rotated, as a model of `dtype` computes with it: fp32."""
        return self.on_base(self.form.decode(self.tensors, self._shape, dtype).to(self.matrix))

    def on_base(self, value: Tensor) -> Tensor:
        """The whole matrix, for inputs that are not rotated, of a stored matrix or delta."""
        value = value if self.rotation is None else self.rotation.back(value)
        return value if self.base is None else self.base + value

    def stored_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient in the stored matrix or delta, given that in the whole matrix."""
        return gradient if self.rotation is None else self.rotation(gradient)


@dataclass(frozen=True, eq=False)
class CodedExpert(RefinableExperts):
    """One expert that is stored as codes.

    Attributes:
        roles: its matrices.
        dtype: the dtype of the model.
    """

    roles: Mapping[Role, StoredMatrix]
    dtype: torch.dtype

    def matrices(self, expert: int) -> dict[Role, Tensor]:
        return {role: own.value(self.dtype) for role, own in self.roles.items()}


class MovingCodes(MovingExperts[CodedExpert]):
    """Codes and scales of one expert. Steps become shorter in a straight line, to zero."""

    batch_tokens: ClassVar[int] = BATCH_TOKENS

    def __init__(self, expert: CodedExpert) -> None:
        self._expert, every = expert, expert.roles.items()
        self._trainables = {role: found for role, own in every if (found := own.trainable()) is not None}
        self._last = {role: own.value(expert.dtype) for role, own in every if role not in self._trainables}

    @property
    def can_move(self) -> bool:
        return bool(self._trainables)

    def matrices(self, expert: int) -> ExpertMatrices:
        for role, trainable in self._trainables.items():
            self._last[role] = self._expert.roles[role].on_base(trainable.dense()).requires_grad_(True)
        return self._last

    def step(self, step: int, steps: int) -> None:
        left = 1 - step / steps
        for role, trainable in self._trainables.items():
            gradient = self._last[role].grad
            assert gradient is not None
            own = self._expert.roles[role].stored_gradient(gradient)
            trainable.step(own, Pace(_PACE.codes * left, _PACE.scales * left))

    def stored(self) -> CodedExpert:
        roles = {
            role: replace(own, tensors=self._trainables[role].tensors()) if role in self._trainables else own
            for role, own in self._expert.roles.items()
        }
        return replace(self._expert, roles=roles)
