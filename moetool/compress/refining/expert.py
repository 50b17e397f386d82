"""One expert, whose stored tensors are moved so that its output comes nearer to what it was."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.calibration.routed_tokens import Given
from moetool.compress.refining.running import batches
from moetool.numerics.precision import has_fast_bf16
from moetool.numerics.rotation import Rotation
from moetool.representations import Representation
from moetool.representations.trainable import Pace, Trainable

ExpertMatrices = Mapping[Role, Tensor]
RunExpert = Callable[
    [ExpertMatrices, Tensor], Tensor
]  # an expert of these matrices [out, in] on [tokens, hidden], fp32

BATCH_TOKENS = 512  # tokens per step
_PACE = Pace(codes=0.01, scales=0.006)
_AT_ONCE = 4096  # tokens in evaluation
FEWEST = 32  # tokens to learn from, and as few to see what it was good for


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """One matrix `[out, in]` as it is stored.

    Attributes:
        form: of the tensors.
        tensors: by name.
        matrix: what they were made of, fp32.
        base: what they are added to, fp32; `None` if they are the whole matrix.
        turn: the rotation of inputs that they are for, if any; `matrix` is for such inputs, too, and `base` is not.
    """

    form: Representation
    tensors: Mapping[str, Tensor]
    matrix: Tensor
    base: Tensor | None
    turn: Rotation | None = None

    @property
    def _shape(self) -> tuple[int, int]:
        rows, columns = self.matrix.shape
        return rows, columns

    def trainable(self) -> Trainable | None:
        """The tensors for gradients to move."""
        return self.form.trainable(self.tensors, self._shape, self.matrix)

    def value(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """What such tensors stand for in a model of `dtype`, with the base: fp32."""
        return self.on_base(self.form.decode(tensors, self._shape, dtype).to(self.matrix))

    def on_base(self, value: Tensor) -> Tensor:
        """A matrix or a delta as a matrix, for inputs as they are."""
        value = value if self.turn is None else self.turn.back(value)
        return value if self.base is None else self.base + value

    def blamed(self, gradient: Tensor) -> Tensor:
        """The gradient in a matrix or a delta, of that in what `on_base` makes of it."""
        return gradient if self.turn is None else self.turn(gradient)


@dataclass(frozen=True)
class Refined:
    """Refined matrices of one expert, and their loss before and after.

    Attributes:
        tensors: by role, those that are to be stored.
        before, after: what its errors cost on tokens that it did not learn from, summed: as it was, and with `tensors`.
        is_better: whether it was changed.
    """

    tensors: Mapping[Role, Mapping[str, Tensor]]
    before: float
    after: float
    is_better: bool


@dataclass(frozen=True, eq=False)
class Refinement:
    """Target output of one expert, and the optimizer that fits its stored form to it.

    Attributes:
        run: an expert.
        original: its matrices as they were.
        metric: C `[hidden, hidden]`: an error e in the output costs `½ ‖e C‖²`.
        steps: how many.
        dtype: of the model.
    """

    run: RunExpert
    original: ExpertMatrices
    metric: Tensor
    steps: int
    dtype: torch.dtype

    def refine(
        self, stored: Mapping[Role, StoredMatrix], given: Given, held_out: Given, stream: torch.Generator
    ) -> Refined:
        """Move the tensors of an expert, by role, on what it is `given`; leave them as they were if that makes it no
        better on what was `held_out`, or if there is too little of either."""
        tensors = {role: own.tensors for role, own in stored.items()}
        trainables = {role: found for role, own in stored.items() if (found := own.trainable()) is not None}
        if not trainables or min(len(given.inputs), len(held_out.inputs)) < FEWEST:
            return Refined(tensors, 0.0, 0.0, is_better=False)
        goal = self._outputs(self.original, held_out)
        before = self._cost(self._values(stored, tensors), held_out, goal)
        self._move(stored, trainables, given, stream)
        moved = {role: trainables[role].tensors() if role in trainables else own for role, own in tensors.items()}
        after = self._cost(self._values(stored, moved), held_out, goal)
        if not after < before:
            return Refined(tensors, before, before, is_better=False)
        return Refined(moved, before, after, is_better=True)

    def _move(
        self,
        stored: Mapping[Role, StoredMatrix],
        trainables: Mapping[Role, Trainable],
        given: Given,
        stream: torch.Generator,
    ) -> None:
        target = self._outputs(self.original, given)
        fixed = {role: own.value(own.tensors, self.dtype) for role, own in stored.items() if role not in trainables}
        for step, rows in enumerate(batches(len(target), BATCH_TOKENS, self.steps, stream)):
            rows = rows.to(target.device)
            matrices = dict(fixed)
            for role, trainable in trainables.items():
                matrices[role] = stored[role].on_base(trainable.dense()).requires_grad_(True)
            with torch.enable_grad():
                with _in_few_digits(target.device):
                    output = self.run(matrices, given.inputs[rows])
                error = (output.float() * given.weights[rows] - target[rows]) @ self.metric
                (error.square().sum() / len(rows)).backward()
            left = 1 - step / self.steps
            for role, trainable in trainables.items():
                gradient = matrices[role].grad
                assert gradient is not None
                trainable.step(stored[role].blamed(gradient), Pace(_PACE.codes * left, _PACE.scales * left))

    def _values(
        self, stored: Mapping[Role, StoredMatrix], tensors: Mapping[Role, Mapping[str, Tensor]]
    ) -> dict[Role, Tensor]:
        return {role: own.value(tensors[role], self.dtype) for role, own in stored.items()}

    @torch.no_grad()
    def _outputs(self, matrices: ExpertMatrices, given: Given) -> Tensor:
        """`[tokens, hidden]`, as routing weighs them."""
        parts = [
            self.run(matrices, inputs) * weights
            for inputs, weights in zip(given.inputs.split(_AT_ONCE), given.weights.split(_AT_ONCE), strict=True)
        ]
        return torch.cat(parts)

    def _cost(self, matrices: ExpertMatrices, given: Given, goal: Tensor) -> float:
        error = (self._outputs(matrices, given) - goal) @ self.metric
        return 0.5 * float(error.square().sum(dtype=torch.float64))


def _in_few_digits(device: torch.device) -> AbstractContextManager[object]:
    """Products in bf16 where these are faster."""
    if device.type == "cpu" and not has_fast_bf16():
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
