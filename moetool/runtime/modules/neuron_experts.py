"""Experts that are the neurons of a dense feed-forward network: (G-)MoEfication (Lee et al., 2024).

    F(x) = b2 + W2 r + Σ_{j in the selected experts} (a_j − r_j) W2[:, j]

with a the activations that W2 multiplies, and r their representative values, `centre` (zeros: MoEfication, Zhang et
al., arXiv:2110.01786). Expert k is the neurons k·s to (k+1)·s, s = f / K. What unselected experts give, Eq. 14's
embeddings, is one constant vector. Names on disk are in `format/kinds/moefied.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.shape import Role
from moetool.format.kinds.moefied import Lead, MoefiedSpec
from moetool.runtime.modules.by_number import Numbered, run_rows_by_number
from moetool.runtime.modules.insertion import add_placeholder
from moetool.runtime.modules.networks import KernelNeurons, SplitFFN, dropout_of, wide
from moetool.runtime.modules.offloading import below, loaded


class _Rule(NamedTuple):
    """When which way to compute what tokens have selected is the fastest, as measured with
    scripts/benchmarks/moefied.py.

    Attributes:
        few: tokens per expert up to which kernels read the experts of every token where they lie (on a card without
            them, all are computed, which waits for nothing).
        tokens, neurons, kept: tokens and neurons per expert from which on, and share of the experts up to which, it
            pays to run experts one after the other, each on its own tokens, instead of all of them on all tokens.
        used: share of the experts, used by any of the tokens, up to which it pays to leave out the others.
    """

    few: int
    tokens: int
    neurons: int
    kept: float
    used: float


_RULES = dict.fromkeys((torch.float32, torch.float64), _Rule(few=12, tokens=4, neurons=1, kept=1.0, used=1.0))
_RULE_IN_16_BITS = _Rule(few=3, tokens=64, neurons=128, kept=0.5, used=0.5)


class Selector(nn.Module):
    """Network that predicts a score per expert from a hidden state: `second(tanh(first(x / ‖x‖)))` (G-MoEfication)."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, experts, bias=False)
        self.second = nn.Linear(experts, experts, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """`[tokens, hidden]` → `[tokens, experts]`, at least fp32 from the first product on."""
        dtype = wide(rows)
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=dtype).clamp_min(torch.finfo(dtype).tiny)
        return F.linear((self.first(rows) / norms).tanh(), self.second.weight.to(dtype))


class NeuronExperts(Numbered, SplitFFN):
    """A feed-forward network of which every token uses the experts that it is expected to need.

    Attributes:
        keep: the share of the experts that is used.
        kept: how many that is.
        on_selection: called with the experts `[tokens, kept]` of every call, the highest score first; None by default.
    """

    order: Tensor

    def __init__(
        self,
        ffn: nn.Module,
        names: Mapping[Role, str],
        act_fn: Callable[[Tensor], Tensor],
        hidden: int,
        intermediate: int,
        spec: MoefiedSpec,
        expected: str | None,
        lead: Lead | None = None,
    ) -> None:
        """Build around `ffn`, on its device and in its dtype.

        Args:
            ffn: holds the linear layers, whose neurons are ordered by expert. It is not called itself.
            names: path below `ffn` of the linear layer of every role: gate, up and down, or up and down. Gate and up
                may be one layer, the gate's rows first.
            act_fn: the activation function.
            hidden: d, the width of inputs and outputs.
            intermediate: f, the number of neurons.
            spec: how many experts, what share of them, and the selector: `oracle` is the true Σ (a − r)² per expert,
                from all activations, for measuring only; `fixed` takes the first of the buffer `order`.
            expected: name of a weight that others expect, if there is one.
            lead: the projection that chooses, where one does.

        Raises:
            ValueError: the experts do not divide the neurons, a matrix has another shape, a lead is none of the
                network's projections, or has experts of more than one neuron to choose.
        """
        super().__init__(ffn, names, act_fn, hidden, intermediate, spec.experts)
        self.selector_kind = spec.selector
        self.dropout, self.factor, self.adds = dropout_of(ffn), 1.0, False
        self.on_selection: Callable[[Tensor], object] | None = None
        self._cached: dict[str, tuple[object, object]] = {}
        self.take_number()
        self.set_keep(spec.keep)
        like = self.linear("down").weight
        with torch.device(like.device):
            if self.selector_kind == "mlp":
                self.selector = Selector(hidden, self.num_experts).to(like.dtype)
            elif self.selector_kind == "fixed":
                self.register_buffer("order", torch.arange(self.num_experts))
                self.index_limits = {"order": self.num_experts}
            elif lead is not None:
                self.lead = _checked(lead, names, self.num_experts, intermediate)
                self.register_buffer("price", torch.ones(intermediate, dtype=wide(like)))
        if expected is not None:
            add_placeholder(self, expected, like)
        self.register_load_state_dict_post_hook(_forget)

    def set_keep(self, keep: float) -> None:
        """Use that share of the experts from now on.

        Raises:
            ValueError: it is not above 0 and at most 1, or less than half an expert.
        """
        if not 0 < keep <= 1 or not (kept := round(keep * self.num_experts)):
            raise ValueError(
                f"keep is {keep}: it must be above 0, at most 1, and leave one of {self.num_experts} experts"
            )
        self.keep, self.kept = keep, kept
        self._cached.clear()  # of a matrix that is laid elsewhere nothing must be held
        if kept == self.num_experts:
            self.lie_by_rows()

    @torch.no_grad()
    def scores(self, rows: Tensor) -> Tensor:
        """How much a token `[tokens, hidden]` needs each expert: `[tokens, experts]`. Not for a fixed selection."""
        if self.selector_kind == "mlp":
            return self.selector(rows)
        residual = self.activation(rows, [(0, self.intermediate)]) - self.subtracted
        return residual.to(wide(rows)).square().unflatten(-1, (self.num_experts, self.size)).sum(-1)

    def select(self, rows: Tensor) -> Tensor:
        """The experts that tokens `[tokens, hidden]` use, `[tokens, kept]`, the highest score first."""
        if self.kept == self.num_experts:
            return torch.arange(self.num_experts, device=rows.device).expand(len(rows), -1)
        if self.selector_kind == "fixed":
            return self.order[: self.kept].expand(len(rows), -1)
        return self.scores(rows).topk(self.kept, dim=-1).indices

    def constant(self) -> Tensor:
        """`b2 + W2 r [hidden]`, the output with no expert selected; at least fp32 where it needs no gradient."""
        down = self.linear("down")
        tensors = [tensor for tensor in (down.weight, down.bias, self.centre) if tensor is not None]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return F.linear(self.subtracted, down.weight, down.bias)

        def compute() -> Tensor:
            dtype = wide(down.weight)
            bias = None if down.bias is None else down.bias.to(dtype)
            return F.linear(self.subtracted.to(dtype), down.weight.to(dtype), bias)

        return self._cache("constant", tensors, compute)

    def forward(self, hidden_states: Tensor, *residual: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`; in a family whose networks add the residual, that is an argument, too."""
        result = self._computed(hidden_states)
        result = result if self.factor == 1.0 else result * self.factor
        return result + residual[0] if self.adds else result

    def _computed(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return run_rows_by_number(hidden_states, self._number, self.hidden)
        return self.infer(hidden_states)

    def infer(self, hidden_states: Tensor) -> Tensor:
        """Run the forward pass outside of any compiled graph, with offloaded weights fetched for its time."""
        with loaded(*below(self)) as fetched:  # whose weights are read, not called
            return self._forward(hidden_states, fetched)

    def _forward(self, hidden_states: Tensor, fetched: bool) -> Tensor:
        rows = hidden_states.reshape(-1, self.hidden)
        if self.kept == self.num_experts or not len(rows):
            if self.on_selection is not None:
                self.on_selection(self.select(rows))
            result = self.whole(rows)
        else:
            result = (self._part(rows, fetched) + self.constant()).to(rows.dtype)
        return F.dropout(result, self.dropout, self.training).view_as(hidden_states)

    def _part(self, rows: Tensor, fetched: bool) -> Tensor:
        """`Σ (a − r) W2` over the neurons that are selected, `[tokens, hidden]`, at least fp32. Weights that were
        `fetched` for this call are none that kernels could find in the next."""
        chosen = self.select(rows)
        if self.on_selection is not None:
            self.on_selection(chosen)
        return self._selected(rows, chosen, fetched)

    def _selected(self, rows: Tensor, chosen: Tensor, fetched: bool) -> Tensor:
        """Compute `_part` for the experts `chosen [tokens, kept]`."""
        rule = _RULES.get(rows.dtype, _RULE_IN_16_BITS)
        share = self.kept / self.num_experts
        is_few = len(rows) * share <= rule.few
        if is_few and not fetched and not torch.is_grad_enabled():
            tensors = [self.centre, *self.ffn.parameters()]
            neurons: KernelNeurons | None = self._cache("neurons", tensors, self.on_kernels)
            if neurons is not None:
                return neurons.forward(rows, chosen)
        if self.selector_kind == "fixed":
            experts, index = self._cache("order", [self.order], self._fixed, self.kept)
            return self.by_runs(rows, experts, None, index)
        if self.can_group(rows):
            pieces = zip(*(part.split(max(1, 2**15 // self.kept)) for part in (rows, chosen)), strict=True)
            return torch.cat([self.grouped(*piece) for piece in pieces])
        everything = list(range(self.num_experts))
        if is_few and rows.device.type != "cpu":
            index = torch.arange(self.num_experts, device=rows.device)
            return self.by_runs(rows, everything, self._used(chosen), index)
        if len(rows) == 1:
            return self.by_runs(rows, sorted(chosen[0].tolist()), None)
        if len(rows) * share >= rule.tokens and self.size >= rule.neurons and share <= rule.kept:
            return self.by_expert(rows, chosen)
        used = self._used(chosen)
        experts = used.any(0).nonzero()[:, 0].tolist()
        return self.by_runs(rows, everything if len(experts) > rule.used * self.num_experts else experts, used)

    def _fixed(self) -> tuple[list[int], Tensor]:
        """The experts of a fixed selection, as they lie in memory."""
        index = self.order[: self.kept].sort().values
        return index.tolist(), index

    def _used(self, chosen: Tensor) -> Tensor:
        """`[tokens, experts]` bool: which experts a token uses."""
        nothing = torch.zeros(len(chosen), self.num_experts, dtype=torch.bool, device=chosen.device)
        return nothing.scatter_(1, chosen, True)

    def _cache(self, name: str, tensors: list[Tensor], compute: Callable[[], Any], *more: object) -> Any:
        """What `compute` gives, until one of the tensors is changed or replaced."""
        key = more, [(t.data_ptr(), t.dtype, t.device, t.is_inference() or t._version) for t in tensors]
        found = self._cached.get(name)  # once: another thread may be here, too
        if found is None or found[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                found = self._cached[name] = key, compute()
        return found[1]

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation, and drop what was made for evaluation."""
        self._cached.clear()
        if mode:
            self.lie_by_rows()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._cached.clear()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cached": {}}

    def extra_repr(self) -> str:
        return f"{self.kept} of {self.num_experts} experts of {self.size} neurons, {self.selector_kind}"


def _checked(lead: Lead, names: Mapping[Role, str], experts: int, neurons: int) -> Lead:
    if experts != neurons:
        raise ValueError(f"{experts} experts are not one for each of the {neurons} neurons")
    if lead not in names:
        raise ValueError(f"{lead} should choose neurons, which the network lacks")
    return lead


def _forget(module: NeuronExperts, _: object) -> None:
    module._cached.clear()
