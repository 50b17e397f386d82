"""Refinement of all experts of a layer together: the base and the low-rank factors of the deltas move.

Factors as they are cut are best for each matrix alone, beside a base that was made before there were any. Together they
can do more: the base can take what all factors leave over, a layer's gate, up and down make up for each other's errors,
and so do experts that a token goes to together. Adam (arXiv:1412.6980) moves all of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.compress.refining.refinement import MovingExperts, RefinableExperts
from moetool.numerics.precision import fast_products
from moetool.representations import Representation

MatrixKey = tuple[Role, int]  # a matrix, by its role and expert

TOKENS_PER_STEP = 2048
_PACE = 0.008  # the longest step, as a share of the root mean square of a factor, or for a base of the deltas to it
_BETAS = (0.9, 0.99)
_WARMING = 5  # steps until the longest


@dataclass(frozen=True, eq=False)
class FactoredExperts(RefinableExperts):
    """The experts of a layer, by the tensors that they are stored as, fp32.

    Attributes:
        roles: the roles of each expert's matrices.
        bases: by role, the base `[out, in]`.
        masks: by role whose base may move, a matrix `[out, in]` that is 1 where the base has numbers and 0 where
            channels were pruned.
        factors: U `[out, rank]` and V `[rank, in]` of every low-rank delta; without them a matrix is the base.
        whole: every matrix `[out, in]` that is on no base.
        deltas: every delta `[out, in]` to a base that is in codes, which stay.
        forms: the form that factors are stored in.
        dtype: the dtype that bases and factors, or scales of their codes, are stored in.
    """

    roles: tuple[Role, ...]
    bases: Mapping[Role, Tensor]
    masks: Mapping[Role, Tensor]
    factors: Mapping[MatrixKey, tuple[Tensor, Tensor]]
    whole: Mapping[MatrixKey, Tensor]
    deltas: Mapping[MatrixKey, Tensor]
    forms: Mapping[MatrixKey, Representation]
    dtype: torch.dtype

    def matrices(self, expert: int) -> dict[Role, Tensor]:
        return {role: self._matrix((role, expert)) for role in self.roles}

    def _matrix(self, key: MatrixKey) -> Tensor:
        if key in self.whole:
            return self.whole[key]
        base = self.bases[key[0]]
        if key in self.deltas:
            return base + self.deltas[key]
        return base if key not in self.factors else torch.addmm(base, *self.factors[key])

    def rounded(self) -> "FactoredExperts":
        """The experts with bases that may move, and factors, rounded to the dtype that they are stored in."""

        def of_factors(key: MatrixKey, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            form, shape = self.forms[key], (len(u), v.shape[1])
            found = form.decode_factors(form.encode_factors(u.detach(), v.detach(), self.dtype), shape, self.dtype)
            assert found is not None
            return found

        bases = {
            role: base.detach().to(self.dtype).float() if role in self.masks else base
            for role, base in self.bases.items()
        }
        factors = {key: of_factors(key, u, v) for key, (u, v) in self.factors.items()}
        return replace(self, bases=bases, factors=factors)

    def leaves(self) -> "FactoredExperts":
        """Copy the experts so that each base and factor that may move is a leaf that requires gradients."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(True)

        bases = {role: leaf(base) if role in self.masks else base for role, base in self.bases.items()}
        return replace(self, bases=bases, factors={key: (leaf(u), leaf(v)) for key, (u, v) in self.factors.items()})

    def paces(self) -> Iterator[tuple[Tensor, float]]:
        """Every tensor that may move, and how long a step of its numbers is at most."""
        for role in self.masks:
            sizes = [_size(u @ v) for (own, _), (u, v) in self.factors.items() if own == role]
            sizes += [_size(delta) for (own, _), delta in self.deltas.items() if own == role]
            count = len(sizes) + sum(1 for own, _ in self.whole if own == role)
            if sizes:
                yield self.bases[role], _PACE * sum(sizes) / count
        for u, v in self.factors.values():
            yield u, _PACE * _size(u)
            yield v, _PACE * _size(v)


def _size(tensor: Tensor) -> float:
    """The root mean square of the numbers."""
    return float(tensor.detach().square().mean().sqrt())


class MovingFactors(MovingExperts[FactoredExperts]):
    """Bases and factors of a layer. Steps become longer for five steps, and shorter along a cosine, to zero."""

    batch_tokens: ClassVar[int] = TOKENS_PER_STEP

    def __init__(self, experts: FactoredExperts) -> None:
        self._moved = experts.leaves()
        self._paces = list(self._moved.paces())
        groups = [{"params": [tensor], "lr": pace} for tensor, pace in self._paces]
        self._adam = torch.optim.Adam(groups, betas=_BETAS) if groups else None

    @property
    def can_move(self) -> bool:
        return self._adam is not None

    def matrices(self, expert: int) -> dict[Role, Tensor]:
        with fast_products(next(iter(self._moved.bases.values())).device):
            return self._moved.matrices(expert)

    def step(self, step: int, steps: int) -> None:
        assert self._adam is not None
        share = min(1.0, (step + 1) / _WARMING) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, (_, pace) in zip(self._adam.param_groups, self._paces, strict=True):
            group["lr"] = pace * share
        for role, mask in self._moved.masks.items():
            if (gradient := self._moved.bases[role].grad) is not None:
                gradient.mul_(mask)
        self._adam.step()
        self._adam.zero_grad()

    def stored(self) -> FactoredExperts:
        return self._moved.rounded()
