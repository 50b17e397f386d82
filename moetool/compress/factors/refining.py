"""The base of a layer and the deltas to it, moved together until what its experts give comes nearer to what they gave.

Factors as they are cut are best for each matrix alone, beside a base that was made before there were any. Together they
can do more: the base can take what all factors leave over, a layer's gate, up and down make up for each other's errors,
and experts that a token goes to together do. So gradients move them all, by Adam (arXiv:1412.6980), to lessen

    Σ_t ½ ‖ Σ_i w_ti (f_i(x_t; B, U, V) − f_i(x_t; W)) C ‖²

over tokens t and their experts i, with C Cᵀ the second moment of the loss's gradient at the layer's output.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.compress.factors.routed_text import RoutedText
from moetool.compress.refining.running import batches
from moetool.numerics.precision import bf16_products, has_fast_bf16

MatrixKey = tuple[Role, int]  # of a matrix: its role and expert
RunRouted = Callable[
    [int, Mapping[Role, Tensor], Tensor], Tensor
]  # an expert of these matrices on [tokens, hidden], fp32

TOKENS_PER_STEP = 2048  # tokens per step
_PACE = 0.008  # a step, at most, as a share of how large the factors' numbers, or those of their products, are
_BETAS = (0.9, 0.99)
_WARMING = 5  # steps until a step is that large
_HELD_OUT = 8  # of so many tokens one is not learnt from
_FEWEST = 32  # tokens to learn from, and as few to see what it was good for


@dataclass(frozen=True, eq=False)
class MovableExperts:
    """The experts of a layer, by the tensors that they are stored as, fp32.

    Attributes:
        roles: of their matrices.
        bases: by role that deltas are taken to, `[out, in]`.
        masks: by role whose base may be moved, 1 where it has numbers and 0 where channels are gone, to be multiplied.
        factors: U `[out, rank]` and V `[rank, in]` of each low-rank delta; the others on a base are nothing.
        whole: `[out, in]`, every matrix that is on no base.
    """

    roles: tuple[Role, ...]
    bases: Mapping[Role, Tensor]
    masks: Mapping[Role, Tensor]
    factors: Mapping[MatrixKey, tuple[Tensor, Tensor]]
    whole: Mapping[MatrixKey, Tensor]

    def matrices(self, expert: int) -> dict[Role, Tensor]:
        """Those of one expert, `[out, in]` by role."""
        return {role: self._matrix((role, expert)) for role in self.roles}

    def _matrix(self, key: MatrixKey) -> Tensor:
        if key in self.whole:
            return self.whole[key]
        base = self.bases[key[0]]
        return base if key not in self.factors else torch.addmm(base, *self.factors[key])

    def rounded(self, dtype: torch.dtype) -> "MovableExperts":
        """As they are stored, in `dtype`."""

        def stored(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).float()

        bases = {role: stored(base) if role in self.masks else base for role, base in self.bases.items()}
        return replace(self, bases=bases, factors={key: (stored(u), stored(v)) for key, (u, v) in self.factors.items()})

    def apart(self) -> "MovableExperts":
        """The same in tensors of their own, that gradients are wanted of."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(True)

        bases = {role: leaf(base) if role in self.masks else base for role, base in self.bases.items()}
        return replace(self, bases=bases, factors={key: (leaf(u), leaf(v)) for key, (u, v) in self.factors.items()})

    def paces(self, share: float) -> Iterator[tuple[Tensor, float]]:
        """Every tensor that may be moved, and a share of how large its numbers are; of a base, those of the deltas."""
        for role in self.masks:
            products = [_size(u @ v) for (own, _), (u, v) in self.factors.items() if own == role]
            on_base = len(products) + sum(1 for own, _ in self.whole if own == role)
            if products:
                yield self.bases[role], share * sum(products) / max(1, on_base)
        for u, v in self.factors.values():
            yield u, share * _size(u)
            yield v, share * _size(v)


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt())


@dataclass(frozen=True)
class JointResult:
    """Refined experts of a layer, and their loss before and after.

    Attributes:
        experts: as they are to be stored.
        before, after: what errors cost on tokens that were not learnt from, in nats per token.
    """

    experts: MovableExperts
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class JointTask:
    """Target output of a layer's experts, and the optimizer that fits base and deltas to it.

    Attributes:
        run: an expert.
        text: what they are given.
        target: `[tokens, hidden]` fp32, what they are to give together.
        metric: C `[hidden, hidden]`: an error e costs `½ ‖e C‖²`.
        dtype: of what is stored.
    """

    run: RunRouted
    text: RoutedText
    target: Tensor
    metric: Tensor
    dtype: torch.dtype

    def refine(self, experts: MovableExperts, steps: int, stream: torch.Generator) -> JointResult:
        """Move the experts in so many steps; leave them as they are if that makes them no better on the last tokens,
        from which they do not learn, or if there are too few of them."""
        learnt = len(self.text) - len(self.text) // _HELD_OUT
        if not experts.factors or len(self.text) - learnt < _FEWEST:
            return JointResult(experts, 0.0, 0.0)
        held_out = slice(learnt, len(self.text))
        before = self.cost(experts, held_out)
        moved = experts.apart()
        with _few_digits(self.target.device):
            self._move(moved, learnt, steps, stream)
        found = moved.rounded(self.dtype)
        after = self.cost(found, held_out)
        return JointResult(found, before, after) if after < before else JointResult(experts, before, before)

    def _move(self, experts: MovableExperts, learnt: int, steps: int, stream: torch.Generator) -> None:
        """Move all factors by Adam, on the first `learnt` tokens."""
        paces = list(experts.paces(_PACE))
        adam = torch.optim.Adam([{"params": [tensor], "lr": pace} for tensor, pace in paces], betas=_BETAS)
        for step, rows in enumerate(batches(learnt, TOKENS_PER_STEP, steps, stream)):
            rows = rows.to(self.target.device)
            share = min(1.0, (step + 1) / _WARMING) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group, (_, pace) in zip(adam.param_groups, paces, strict=True):
                group["lr"] = pace * share
            adam.zero_grad()
            with torch.enable_grad():
                (self._error(experts, rows).square().sum() / (2 * len(rows))).backward()
            for role, mask in experts.masks.items():
                if (gradient := experts.bases[role].grad) is not None:
                    gradient.mul_(mask)
            adam.step()

    def _error(self, experts: MovableExperts, rows: Tensor | slice) -> Tensor:
        text = self.text[rows]
        return (outputs(self.run, experts.matrices, text) - self.target[rows]) @ self.metric

    @torch.no_grad()
    def cost(self, experts: MovableExperts, rows: slice) -> float:
        """Mean loss that output errors cost on some tokens, in nats per token."""
        parts = range(rows.start, rows.stop, TOKENS_PER_STEP)
        errors = (self._error(experts, slice(start, min(start + TOKENS_PER_STEP, rows.stop))) for start in parts)
        return sum(0.5 * float(error.square().sum(dtype=torch.float64)) for error in errors) / (rows.stop - rows.start)


def outputs(run: RunRouted, matrices: Callable[[int], Mapping[Role, Tensor]], text: RoutedText) -> Tensor:
    """What experts of these matrices give together: `[tokens, hidden]` fp32."""
    result = torch.zeros(text.inputs.shape, device=text.inputs.device)
    for expert in range(text.weights.shape[1]):
        rows, inputs, weights = text.of(expert)
        if len(rows):
            result = result.index_add(0, rows, run(expert, matrices(expert), inputs) * weights)
    return result


def _few_digits(device: torch.device) -> AbstractContextManager[None]:
    """Products in bf16 where the processor is faster at those."""
    return bf16_products() if device.type == "cpu" and has_fast_bf16() else nullcontext()
