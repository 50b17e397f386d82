"""How experts on a shared base run where no gradients are wanted: on kernels that read matrices as they are stored.

Few tokens: every token finds its own experts' matrices by number; nothing waits for what was chosen, and nothing is
written but activations. Many: they are sorted by expert, and its matrices are unpacked, base and delta in one, a part
at a time; low-rank deltas stay products beside those of the base, which meets every token once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.kernels.block import Block
from moetool.kernels.held import Held, are_current
from moetool.kernels.products import is_packed, linear, routed, tokens_met_once
from moetool.kernels.table import Table
from moetool.numerics.rotation import Rotation
from moetool.representations.operand import Products
from moetool.runtime.modules.fused import Between, activated, is_silu

_STEP = 16  # tokens
_ALL = 1 << 30  # tokens: any number
_FEW = 8  # tokens per expert up to which decoding while multiplying is faster than unpacking once


@dataclass(frozen=True)
class RoleMatrices:
    """The matrices of a layer's experts in one role.

    Attributes:
        table: of every routed expert its own, or its delta.
        base: what deltas are to, `[out, in]` or without pruned channels, a table of one; None where there is no base.
        deltas: of every expert whether it has a delta, not a whole matrix.
        uses_base: the same, [experts, 1] fp32, 1 for deltas and 0 for whole matrices.
        bias: [experts, out] as it lies in memory, if they have some.
        turn: what inputs are rotated by before any of it is multiplied.
    """

    table: Table
    base: Table | None
    deltas: tuple[bool, ...]
    uses_base: Tensor
    bias: Tensor | None
    turn: Rotation | None = None

    def turned(self, inputs: Tensor) -> Tensor:
        """Rotate inputs `[…, in]` if the role's matrices are stored for rotated inputs."""
        return inputs if self.turn is None else self.turn(inputs)


@dataclass(frozen=True)
class _Sorted:
    """Pairs of a token and an expert that it chose, by expert; every expert has room for a multiple of `_STEP` of them,
    so that products have few different shapes: each new one costs a product several milliseconds once.

    Attributes:
        pairs: in this order, the first one where there is room left.
        rows: their tokens.
        ends: where the pairs of an expert begin and the one's before it end.
        back: of every pair its place, behind the last one if its expert is not here.
    """

    pairs: Tensor
    rows: Tensor
    ends: list[int]
    back: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "_Sorted":
        """Sort the experts' numbers `[tokens, k]`. Waits once for what they are."""
        ordered, order = chosen.reshape(-1).sort(stable=True)
        device = ordered.device
        found = torch.searchsorted(ordered, torch.arange(experts + 1, device=device)).tolist()
        counts = [end - start for start, end in pairwise(found)]
        ends = list(accumulate((-(-count // _STEP) * _STEP for count in counts), initial=0))
        shifts = torch.tensor([end - start for start, end in zip(found, ends, strict=True)][:-1], device=device)
        here = order[found[0] : found[-1]]
        places = torch.arange(found[0], found[-1], device=device)
        places += shifts.repeat_interleave(torch.tensor(counts, device=device))
        pairs = order.new_zeros(ends[-1]).index_copy_(0, places, here)
        back = order.new_full((len(order),), ends[-1]).index_copy_(0, here, places)
        return cls(pairs, pairs // chosen.shape[1], ends, back)


class _Stage:
    """The matrices that meet the same inputs, in one table, so that few tokens need one product: role after role those
    of all experts, and then the base if `joined`.

    Attributes:
        roles: what they are the matrices of, of one shape.
        table: of all of them.
        joined: up to how many tokens the base is multiplied in the same go, 0 if never.
        uses_base: [roles, experts, 1], None where all are deltas.
    """

    def __init__(self, roles: Sequence[RoleMatrices], *, joins: bool) -> None:
        self.roles, shape = roles, roles[0].table.shape
        bases = [own.base for own in roles if joins and own.base is not None and own.base.shape == shape]
        self.joined = min((few_tokens(base) for base in bases), default=0) if len(bases) == len(roles) else 0
        each = [[*own.table.products, *(own.base.products if self.joined and own.base else ())] for own in roles]
        self._experts = len(roles[0].table.products)
        self.table = Table([products for own in each for products in own], shape, ())
        device = roles[0].uses_base.device
        self._starts = torch.arange(len(roles), device=device)[:, None, None] * len(each[0])
        has_base = all(own.base is not None for own in roles)
        whole = has_base and not all(uses for own in roles for uses in own.deltas)
        self.uses_base = torch.stack([own.uses_base for own in roles]) if whole else None

    def outside(self) -> int:
        """An expert number that stands for no expert in any role."""
        return -len(self.table.products)

    def __call__(self, chosen: Tensor, inputs: Tensor) -> Tensor:
        """Experts' numbers `[tokens, k]`, inputs `[tokens, k, in]` or one more for the base → `[roles, tokens, …, out]`
        fp32."""
        tokens, count, columns = inputs.shape
        if count > chosen.shape[1]:
            chosen = F.pad(chosen, (0, 1), value=self._experts)
        given = inputs.expand(len(self.roles), tokens, count, columns).reshape(-1, columns)
        found = routed(self.table, (chosen + self._starts).view(-1), given)
        return found.view(len(self.roles), tokens, count, self.table.shape[0])


@dataclass(frozen=True)
class _Met:
    """Tokens that meet a base by itself, beside the deltas of their experts.

    Attributes:
        experts: those whose deltas and base are multiplied by one after the other.
        tokens: who chose them, ascending.
        places: of every sorted pair, that of its token among `tokens`; anything for other experts' pairs.
    """

    experts: frozenset[int]
    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, sorted_by: _Sorted, experts: Sequence[int], tokens: int) -> "_Met":
        meets = torch.zeros(tokens, dtype=torch.bool, device=sorted_by.rows.device)
        for expert in experts:
            meets[sorted_by.rows[sorted_by.ends[expert] : sorted_by.ends[expert + 1]]] = True
        places = (meets.cumsum(0) - 1).index_select(0, sorted_by.rows)
        return cls(frozenset(experts), meets.nonzero().flatten(), places)


class KernelExperts:
    """The routed experts of one layer, as they lay in memory when this was made.

    Attributes:
        common: tensors that all experts have in common, as they lay.
        each: those of every expert, where they are held one by one.
    """

    def __init__(
        self,
        roles: Mapping[Role, RoleMatrices],
        act_fn: Between,
        channels: Tensor | None = None,
        base_down: Callable[[Tensor], Tensor] | None = None,
        held: Sequence[Held] = (),
    ) -> None:
        """`channels` [kept] int32 are those that a pruned base still has; `base_down`, `[tokens, intermediate]` →
        `[tokens, hidden]`, takes the place of the product with the down base where that is more than a product; `held`
        are the tensors that all experts have in common, and then each one's, where the tables do not hold them."""
        self.roles, self._act_fn, self._channels, self._base_down = roles, act_fn, channels, base_down
        tables = [table.held for own in roles.values() for table in (own.table, own.base) if table is not None]
        self.common = [own for own in (*tables, *held[:1]) if not own.is_empty]  # each is looked at for every token
        self.each = held[1:]
        self._experts = len(roles["down"].table.products)
        self._first = _Stage([own for _, own in self._entering()], joins=channels is None)
        self._second = _Stage([roles["down"]], joins=channels is None and base_down is None)
        self._block = self._in_one_call() if channels is None and base_down is None else None

    def is_current(self, chosen: Tensor | None = None) -> bool:
        """Whether all tensors are where they were, or those that tokens need that chose so. For a few tokens the
        others are not looked at: there are thousands."""
        each = self.each
        if chosen is not None and chosen.device.type == "cpu" and chosen.numel() < len(each):
            each = [each[expert] for expert in set(chosen.flatten().tolist()) if 0 <= expert < len(each)]
        return are_current([*self.common, *each])

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`, in the dtype of `hidden`. Numbers of
        experts that are not here count as nothing."""
        few = chosen.numel() <= _FEW * min(self._experts, chosen.numel())
        if few and self._block is not None and len(hidden) <= self._block[1]:
            turn = self.roles["up"].turn  # gate, too
            return self._block[0](hidden if turn is None else turn(hidden.float()), chosen, weights).to(hidden.dtype)
        outside = chosen != chosen.clamp(0, self._experts - 1)
        weights = weights.float().masked_fill(outside, 0).reshape(-1, 1)
        chosen = chosen.masked_fill(outside, self._first.outside())
        return (self._few if few else self._many)(hidden, chosen, weights).to(hidden.dtype)

    def for_one_token(self) -> Block | None:
        """All of it as one call for a token as it comes, if kernels have that."""
        if self._block is None or self._block[1] < 1 or self.roles["up"].turn is not None:
            return None
        return self._block[0]

    def _in_one_call(self) -> tuple[Block, int] | None:
        """All of it as one call, and for how many tokens at most, where kernels have what is between the matrices."""
        first, second, down = self._first, self._second, self.roles["down"]
        biased = any(own.bias is not None for own in self.roles.values())
        if not is_silu(self._act_fn) or biased or down.turn is not None or down.uses_base.device.type != "cpu":
            return None
        most = [stage.joined for stage in (first, second) if any(own.base for own in stage.roles)]
        uses = [own.uses_base for own in (*first.roles, down)]
        return Block(first.table, second.table, (bool(first.joined), bool(second.joined)), uses), min(
            most, default=_ALL
        )

    def _few(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, k = chosen.shape
        first, second, down = self._first, self._second, self.roles["down"]
        weights, safe = weights.view(tokens, k, 1), chosen.clamp_min(0)
        joined = tokens <= first.joined
        given = self.roles["up"].turned(hidden.float())  # gate, too
        found = first(chosen, given.unsqueeze(1).expand(tokens, k + joined, hidden.shape[1]))
        values, bases = found[:, :, :k], found[:, :, k:]
        if not joined and (apart := [self._base(own.base, given.to(hidden.dtype)) for own in first.roles if own.base]):
            bases = torch.stack(apart).unsqueeze(2)
        if bases.numel():
            values = values + (bases if first.uses_base is None else bases * first.uses_base[:, safe])
        both = [
            value if own.bias is None else value + own.bias[safe]
            for value, own in zip(values.unbind(), first.roles, strict=True)
        ]
        activation = down.turned(activated(self._act_fn, both) * weights)
        if down.base is None:
            output = second(chosen, activation)[0].sum(1)
        else:
            uses = second.uses_base
            summed = (activation if uses is None else activation * uses[0, safe]).sum(1)
            if tokens <= second.joined:
                output = second(chosen, torch.cat([activation, summed.unsqueeze(1)], 1))[0].sum(1)
            else:
                output = second(chosen, activation)[0].sum(1) + self._down(down.base, summed.to(hidden.dtype))
        return output if down.bias is None else output + (down.bias[safe] * weights).sum(1)

    def _many(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        sorted_by, hidden = _Sorted.of(chosen, self._experts), self.roles["up"].turned(hidden)  # gate, too
        spans = {expert: slice(*span) for expert, span in enumerate(pairwise(sorted_by.ends)) if span[0] < span[1]}
        wholes = {role: self._wholes(own, list(spans), hidden) for role, own in self.roles.items()}
        met = {
            role: _Met.of(
                sorted_by,
                [expert for expert in spans if own.deltas[expert] and expert not in wholes[role]],
                len(hidden),
            )
            for role, own in self.roles.items()
            if own.base is not None
        }
        bases = {
            role: self._base(own.base, hidden.index_select(0, met[role].tokens)).to(hidden.dtype)
            for role, own in self._entering()
            if own.base is not None and met[role].experts
        }
        shares, down = weights.index_select(0, sorted_by.pairs), self.roles["down"]
        # What experts give lies in their order and is put back at once: adding to rows one by one takes far longer.
        outputs = torch.empty(len(shares) + 1, down.table.shape[0], device=hidden.device)
        outputs[-1] = 0
        apart = met["down"].experts if "down" in met else frozenset()
        activations = hidden.new_zeros(len(outputs) if apart else 0, down.table.shape[1])  # those that the base meets
        for expert, span in spans.items():
            given, values = hidden.index_select(0, sorted_by.rows[span]), []
            for role, own in self._entering():
                products = wholes[role].get(expert, own.table.products[expert])
                value = linear(products, given, own.table.shape[0])
                if role in bases and expert in met[role].experts:
                    value = value + bases[role].index_select(0, met[role].places[span])
                values.append(value if own.bias is None else value + own.bias[expert])
            activation = down.turned(activated(self._act_fn, values).to(hidden.dtype))
            value = linear(wholes["down"].get(expert, down.table.products[expert]), activation, down.table.shape[0])
            torch.mul(value if down.bias is None else value + down.bias[expert], shares[span], out=outputs[span])
            if expert in apart:
                activations[span] = activation * shares[span]
        output = outputs.index_select(0, sorted_by.back).unflatten(0, chosen.shape).sum(1)
        if down.base is not None and apart:
            tokens = met["down"].tokens
            back = sorted_by.back.view(chosen.shape).index_select(0, tokens)
            summed = activations.index_select(0, back.flatten()).unflatten(0, back.shape).sum(1, dtype=torch.float32)
            output.index_add_(0, tokens, self._down(down.base, summed.to(hidden.dtype)).float())
        return output

    def _entering(self) -> Iterator[tuple[Role, RoleMatrices]]:
        return ((role, own) for role, own in self.roles.items() if role != "down")

    def _wholes(self, own: RoleMatrices, experts: Sequence[int], hidden: Tensor) -> dict[int, Products]:
        """The sum of delta and base of those `experts` whose delta is written out anyway, unless all tokens meet the
        base in less time."""
        if own.base is None or self._channels is not None:
            return {}
        if self._base_down is not None and own is self.roles["down"]:
            return {}
        base = own.base.products[0]
        if not is_packed(base) and len(hidden) <= tokens_met_once(hidden) * len(experts):
            return {}
        deltas = {expert: own.table.products[expert] for expert in experts if own.deltas[expert]}
        return {expert: delta + base for expert, delta in deltas.items() if is_packed(delta)}

    def _base(self, base: Table, hidden: Tensor) -> Tensor:
        """The product with a base that meets the input, for all channels: `[tokens, intermediate]` fp32."""
        values = _times(base, hidden)
        if self._channels is None:
            return values
        channels = self.roles["down"].table.shape[1]
        return values.new_zeros(len(values), channels).index_copy_(1, self._channels.long(), values)

    def _down(self, base: Table, activations: Tensor) -> Tensor:
        """The product with the down base: `[tokens, hidden]`."""
        if self._base_down is not None:
            return self._base_down(activations)
        return _times(base, activations if self._channels is None else activations[:, self._channels])


def _times(table: Table, inputs: Tensor) -> Tensor:
    """Inputs times the only matrix of a table: `[tokens, in]` → `[tokens, out]` fp32."""
    if len(inputs) <= few_tokens(table):
        return routed(table, torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device), inputs)
    return linear(table.products[0], inputs, table.shape[0]).float()


def few_tokens(table: Table) -> int:
    """The number of tokens up to which the only matrix of a table is multiplied token by token."""
    return _FEW if is_packed(table.products[0]) else _FEW // 2
