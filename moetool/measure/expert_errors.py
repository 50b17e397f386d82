"""Errors of experts' matrices against their source, and whether the form of each accounts for its error.

A form stores the expert's matrix, or its delta, the matrix less the base. Relative to that, an error depends on the
form: about 2^-bits for codes, up to all of it for a delta that was dropped. A matrix is doubted if its error is beyond
`Representation.doubtful_error`, or far beyond the median of the experts of its layer that have the same form. As some
matrices lose as much with good reason (a few large numbers in a row, a delta that is not of low rank), a doubted one is
encoded afresh, and only what is far from that, too, is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.format.layout import LayerLayout
from moetool.job.job import Source
from moetool.job.progress import Progress, phase
from moetool.job.result import relative_error, significant
from moetool.job.stage import AnyStage, Effect
from moetool.representations import Representation

ROUNDING = 2.0**-7  # of a matrix: as much as numbers in bf16 may differ twice over
WORSE_THAN_FRESH = 4.0  # codes that make good for each other's errors were up to 3 times as far as the nearest
_FAR = 3.0  # from the median of the same form
_PEERS = 4  # experts of which there is a median
_NEARER = 0.8  # of its error, that is left once a base is added that was missing
_WORTHLESS = 2.0  # of a matrix, in an ordinary checkpoint of which nobody knows how it was stored

Stages: TypeAlias = Mapping[str, type[AnyStage]]  # by name
NO_STAGES: Stages = MappingProxyType({})


def effects_of(stages: Iterable[str], known: Stages) -> list[Effect]:
    """Effects on experts of each of the named stages; a stage that is not `known` is taken to store them in other
    forms."""
    return [known[name].effect if name in known else "encodes" for name in stages]


@dataclass(frozen=True)
class _Found:
    """Of one matrix W: norms of it, of its error, and of what its form stores; the error that would be left if the
    base were added to a matrix that is stored without."""

    whole: float
    error: float
    stored: float
    with_base: float | None

    @property
    def relative(self) -> float:
        """Error relative to the matrix; zero for a matrix of zeros."""
        return self.error / self.whole if self.whole else 0.0

    @property
    def of_stored(self) -> float:
        """Error of the matrix, relative to the matrix or delta that its form stores."""
        return self.error / self.stored if self.stored else 0.0 if self.error == 0 else float("inf")

    @property
    def is_rounding(self) -> bool:
        """Whether the error is no larger than rounding to the dtype explains."""
        return self.error <= ROUNDING * max(self.whole, self.stored)


class ExpertErrors:
    """Errors of all experts' matrices of `made`, which steps with these `effects` (none if nobody knows the steps) made
    from `original`, of the same shape. They are reported, and not judged, where it was trained.

    Attributes:
        relative: by layer and role `‖W' − W‖ / ‖W‖` over all experts.
        by_expert: the same of each expert.
        problems: matrices whose form does not account for their error.
    """

    def __init__(self, made: Source, original: Source, effects: Sequence[Effect]) -> None:
        self._made, self._original = made.experts, original.experts
        self._effects = effects
        self.relative: dict[int, dict[Role, float]] = {}
        self.by_expert: dict[int, dict[Role, list[float]]] = {}
        self.problems: list[str] = []

    def compare(self, progress: Progress) -> None:
        """Compare every expert matrix of the result with the source's and record relative errors and problems."""
        with phase(progress, "Compare experts", len(self._made.moe_layers), "layers"):
            for layer in self._made.moe_layers:
                self.relative[layer], self.by_expert[layer] = {}, {}
                made_good = [0.0] * self._made.count(layer)
                for role in self._made.shape.roles:
                    found = [self._find(layer, role, expert) for expert in range(self._made.count(layer))]
                    lost, total = (sum(own.error**2 for own in found), sum(own.whole**2 for own in found))
                    self.relative[layer][role] = relative_error(lost, total)
                    self.by_expert[layer][role] = [significant(own.relative) for own in found]
                    if "trains" not in self._effects:
                        self.problems += self._wrong(layer, role, found, made_good)
                    # Up was moved to where it makes good for what gate loses; down makes good for neither.
                    made_good = [own.error for own in found]
                progress.advance()

    def _base(self, layer: int, role: Role) -> Tensor | None:
        has_base = self._made.layout(layer).has_base(role)
        return self._made.full_base(layer, role) if has_base else None

    def _find(self, layer: int, role: Role, expert: int) -> _Found:
        before = self._original.dense(layer, expert, role).double()
        lost = before - self._made.dense(layer, expert, role).double()
        base, forms = self._base(layer, role), self._made.layout(layer).weights[role]
        whole, error = before.norm().item(), lost.norm().item()
        if base is None or forms is None:
            return _Found(whole, error, whole, None)
        if forms[expert].uses_base:
            return _Found(whole, error, (before - base).norm().item(), None)
        return _Found(whole, error, whole, (lost - base).norm().item())

    def _wrong(self, layer: int, role: Role, found: Sequence[_Found], made_good: Sequence[float]) -> Iterator[str]:
        """What is wrong with a role's matrices, which may make good for errors of these norms in others."""
        layout = self._made.layout(layer)
        forms = layout.weights[role]
        for expert, own in enumerate(found):
            if own.is_rounding:
                continue
            if forms is None:
                why = self._wrong_as_it_is(own)
            else:
                peers = [other.of_stored for other, form in zip(found, forms, strict=True) if form == forms[expert]]
                why = self._wrong_in(layer, role, expert, own, forms[expert], peers, made_good[expert])
            if why is not None:
                stored = "" if forms is None else f", stored as '{forms[expert].spec}',"
                yield (
                    f"layer {layer}, {role} of expert {expert}{stored} differs from its source by {own.relative:.3g} "
                    f"of its size, and {why}"
                )

    def _wrong_as_it_is(self, own: _Found) -> str | None:
        """Of a matrix that no form accounts for: an ordinary checkpoint's, or of what several steps have changed."""
        if self._effects and set(self._effects) == {"preserves"}:
            return "should be the same"
        if "rescales" in self._effects or own.relative <= _WORTHLESS:  # dropped at random: errors have no limit
            return None
        return "zeros would be nearer"

    def _wrong_in(
        self,
        layer: int,
        role: Role,
        expert: int,
        own: _Found,
        form: Representation,
        peers: Sequence[float],
        made_good: float,
    ) -> str | None:
        if own.with_base is not None and own.with_base < _NEARER * own.error:
            return f"by {own.with_base / own.whole:.3g} with the base, which nobody adds to it: it was made as a delta"
        lossy = [effect for effect in self._effects if effect != "preserves"]
        if len(lossy) != 1 or "rebases" in lossy:
            return self._wrong_as_it_is(own)
        is_far = len(peers) >= _PEERS and own.of_stored > _FAR * median(peers)
        if own.of_stored <= form.doubtful_error and not is_far:
            return None
        fresh = self._afresh(layer, role, expert, form)
        if own.error <= WORSE_THAN_FRESH * fresh + ROUNDING * own.whole + (made_good if role != "down" else 0.0):
            return None
        return f"by {fresh / own.whole if own.whole else 0.0:.3g} if it is encoded afresh"

    def _afresh(self, layer: int, role: Role, expert: int, form: Representation) -> float:
        """Norm of the error of the same form, encoded from the source without a text."""
        layout, dtype = self._made.layout(layer), self._made.dtype
        target = self._original.dense(layer, expert, role).float()
        base = self._base(layer, role)
        if form.uses_base and base is not None:
            target = target - base
        turned = _turned(layout, role, target)
        rows, columns = turned.shape
        encoded = form.encode(turned, dtype)
        return (turned - form.decode(encoded, (rows, columns), dtype).to(turned)).double().norm().item()


def _turned(layout: LayerLayout, role: Role, matrix: Tensor) -> Tensor:
    turn = layout.input_rotation(role)
    with torch.no_grad():
        return matrix if turn is None else turn(matrix)
