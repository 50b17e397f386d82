"""The run-time module for compressed experts: a drop-in for the fused experts of transformers 5.

`y = Σ_i G_i · down_i(act(gate_i x) · up_i x)` with `W_i = base + Δ_i`. The gate and up bases are multiplied once per
token, whatever the number of routed experts. The down base is multiplied once per token too, on the routing-weighted
sum of the activations: `Σ_i G_i (B + Δ_i) h_i = B (Σ_i G_i h_i) + Σ_i Δ_i (G_i h_i)`, exact by linearity
(D²-MoE, Eq. 10). With the base inside every expert the model would be slower than the original.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moetool.architectures import Role
from moetool.kernels.held import Held, are_held
from moetool.kernels.operands import UnsupportedMatrixError
from moetool.kernels.table import Table
from moetool.representations.base import Weight
from moetool.representations.operand import numbers
from moetool.runtime.modules.expert_tensors import ExpertTensors
from moetool.runtime.modules.fused import activated, add_rows, given_back, gives_back, normed, on_weighed_inputs
from moetool.runtime.modules.inference import KernelExperts, RoleMatrices
from moetool.runtime.modules.offloading import loaded


class SharedBaseExperts(ExpertTensors):
    """Compressed experts of one layer, run in eager torch or handed to kernels; `ExpertTensors` says what they hold."""

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """See `RoutedExperts`; or, of a family whose router weighs inputs, on these alone."""
        run = super().forward
        if top_k_index is None or top_k_weights is None:
            return on_weighed_inputs(run, hidden_states, self.num_experts)
        output: Tensor = run(hidden_states, top_k_index, top_k_weights)
        if not gives_back(self.native):
            return output
        return output + given_back(hidden_states, top_k_index, top_k_weights, self.num_experts)

    def _spread(self, values: Tensor) -> Tensor:
        """Put the base's stored channels `[tokens, base_channels]` where they belong among all of them."""
        if not self.layout.is_pruned:
            return values
        full = values.new_zeros(values.shape[0], self.intermediate_dim)
        return full.index_copy(1, self.base_channels.long(), values)

    def _base_gate_up(self, hidden: Tensor) -> dict[Role, Tensor]:
        """Gate and up of the base, once per token: `[tokens, intermediate]` each."""
        roles = self.layout.shape.entering
        if not self._has_base["up"]:
            return {}
        if self.layout.has_dense_base("up"):
            values: Sequence[Tensor] = F.linear(hidden, self._fused(0, "up")).chunk(len(roles), dim=-1)
        else:
            values = [self._compact(role)(hidden) for role in roles]
        return {role: self._spread(own) for role, own in zip(roles, values, strict=True)}

    def _activation(
        self, expert: int, hidden: Tensor, base: dict[Role, Tensor], tokens: Tensor, biases: Mapping[Role, Tensor]
    ) -> Tensor:
        """`act(gate x) · up x` of one expert for its tokens: `[routed, intermediate]`."""
        roles = self.layout.shape.entering
        if self.layout.weights["up"] is None:
            values = list(self._lies("up").parts(F.linear(hidden, self._fused(expert, "up")), len(roles)))
        else:
            values = [
                base[role][tokens] + self.delta(expert, role)(hidden)
                if self._uses_base(expert, role)
                else self.delta(expert, role)(hidden)
                for role in roles
            ]
        return activated(
            self.act_fn,
            [own + biases[role] if role in biases else own for role, own in zip(roles, values, strict=True)],
        )

    def _base_down(self, activations: Tensor) -> Tensor:
        """The down base on summed activations `[tokens, intermediate]`, without the batch's weakest channels.

        Semi-dynamic pruning (Eq. 9): the score of channel j is `‖base_down[:, j]‖ · ‖h_j‖`, with h_j the activations
        that the base is about to multiply, so the score is exactly the size of what would be lost. By then gate and up
        are computed, so leaving the channel in them costs nothing. No state: a batch gives the same result whatever
        came before it.
        """
        if self.layout.is_pruned:
            activations = activations[:, self.base_channels.long()]
        if not self.layout.has_dense_base("down") and not self.layout.dynamic_channels:
            return self._compact("down")(activations)
        with loaded(*self._bases("down")):
            base = self._base("down").to(activations.dtype)
        if self.layout.dynamic_channels:
            scores = base.detach().float().norm(dim=0) * activations.detach().float().norm(dim=0)
            weakest = scores.argsort(stable=True)[: self.layout.dynamic_channels]
            activations = activations.index_fill(1, weakest, 0)
        return F.linear(activations, base)

    def eager(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `RoutedExperts`. For the backward nothing is kept of an expert that is not native: its activations follow
        from those of the base, which are kept once per token, and its delta, and are computed again, expert by expert.
        """
        with loaded(*self._shared()):
            return self._forward(hidden, chosen, weights)

    def on_kernels(self) -> KernelExperts:
        """Describe bases, deltas and biases of all experts to kernels, as `RoutedExperts.on_kernels` asks for."""
        found = {role: self.biases_of(role) for role in self.layout.shape.roles}
        biases = {role: bias for role, bias in found.items() if bias is not None}
        return self.kernels_of(range(self.num_experts), biases)

    def kernels_of(
        self, experts: Sequence[int], biases: Mapping[Role, Tensor], beside: Iterable[nn.Module] = ()
    ) -> KernelExperts:
        """Some of the experts, numbered from 0 on, as kernels see them now. `biases` [experts, out] are theirs, and
        `beside` the modules that hold these, where they are not this one's.

        Raises:
            UnsupportedMatrixError: some matrix is nothing for them, or elsewhere, or what experts give is normed before
                it is summed.
        """
        if self._is_normed:
            raise UnsupportedMatrixError("what experts give is normed before it is summed")
        shape = self.layout.shape
        stored = [self.delta(expert, role) for expert, role, _ in self.layout.deltas() if expert in experts]
        stored += [self._compact(role) for role, _ in self.layout.compact_bases()]
        if not all(isinstance(weight, Weight) for weight in stored):
            raise UnsupportedMatrixError("an adapter stands where a stored matrix was")
        roles = {}
        for role in shape.roles:
            weights, matrix = self.layout.weights[role], shape.matrix(role)
            products = [
                ((numbers(self.native_matrix(expert, role)),),)
                if weights is None
                else self.delta(expert, role).products()
                for expert in experts
            ]
            base = None
            if self._has_base[role]:
                whole = self.layout.has_dense_base(role)
                single = ((numbers(self.native_matrix(0, role)),),) if whole else self._compact(role).products()
                base = Table([single], self.layout.base_shape(role), ())
            deltas = tuple(self._uses_base(expert, role) for expert in experts)
            uses = torch.tensor(deltas, dtype=torch.float32, device=self.down_proj.device)[:, None]
            table, turn = Table(products, matrix, ()), self._turns.get(role)
            roles[role] = RoleMatrices(table, base, deltas, uses, biases.get(role), turn)
        tables = [table for own in roles.values() for table in (own.table, own.base) if table is not None]
        apart = [[*self.moetool[str(expert)].modules()] for expert in range(self.layout.stored_experts)]
        private = {module for modules in apart for module in modules}
        common = [module for module in self.modules() if module not in private]
        held = [Held([*common, *beside]), *(Held(apart[expert]) for expert in experts)]
        if not are_held((own for table in tables for own in table.products), held):
            raise UnsupportedMatrixError("a tensor is computed whenever it is read")
        dynamic = bool(self.layout.dynamic_channels)
        channels: Tensor | None = self.base_channels if self.layout.is_pruned else None
        return KernelExperts(roles, self.act_fn, channels, self._base_down if dynamic else None, held)

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, top_k = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        weights = top_k_weights.reshape(-1, 1)
        ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0).tolist()
        if (turn := self._turns.get("up")) is not None:
            hidden_states = turn(hidden_states)
        base = self._base_gate_up(hidden_states)
        stored = all(weights is not None for weights in self.layout.weights.values())
        recomputes = torch.is_grad_enabled() and stored
        # Added up in fp32 at least, whatever the dtype; experts come in the same order for every batch.
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        shape = (tokens, self.intermediate_dim)
        is_linear = self._has_base["down"] and not self._is_normed
        routed = hidden_states.new_zeros(shape, dtype=wide) if is_linear else None
        output = hidden_states.new_zeros(tokens, self.hidden_dim, dtype=wide)
        start = 0
        for expert, end in enumerate(ends[: self.num_experts]):
            if start == end:
                continue
            pairs, start = order[start:end], end
            rows = pairs // top_k
            arguments = expert, hidden_states, base, weights[pairs], rows
            if recomputes:
                activation, product = checkpoint(
                    self._routed, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                activation, product = self._routed(*arguments)
            output = add_rows(output, rows, product.to(wide))
            if routed is not None and self._uses_base(expert, "down"):
                routed = add_rows(routed, rows, activation.to(wide))
        output = output.to(hidden_states.dtype)
        if routed is not None:
            output = output + self._base_down(routed.to(hidden_states.dtype))
        return output.to(hidden_states.dtype)

    def _routed(
        self, expert: int, hidden: Tensor, base: dict[Role, Tensor], weights: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One expert on the tokens `rows`: activations times `weights` [routed, 1], and what its own matrix makes of
        them, `[routed, intermediate]` and `[routed, hidden]`. Where a norm follows, all of what it gives, weighted."""
        biases = self._biases(expert)
        activation = self._activation(expert, hidden[rows], base, rows, biases)
        activation = (activation if self._is_normed else activation * weights).to(hidden.dtype)
        if (turn := self._turns.get("down")) is not None:
            activation = turn(activation)
        if self.layout.weights["down"] is not None:
            product = self.delta(expert, "down")(activation)
        else:
            product = F.linear(activation, self._fused(expert, "down"))
        if self._is_normed:
            if self._uses_base(expert, "down"):
                product = product + self._base_down(activation)
            return activation, normed(self, product + biases["down"] if "down" in biases else product) * weights
        return activation, product + weights * biases["down"] if "down" in biases else product

    def shared_expert(self, hidden_states: Tensor, biases: Mapping[Role, Tensor]) -> Tensor:
        """The shared expert where it is stored on the base: `[…, hidden]` → the same. It is the last of the experts,
        and its `biases` are elsewhere."""
        with loaded(self, *self._shared()):
            return self._shared_expert(hidden_states, biases)

    def _shared_expert(self, hidden_states: Tensor, biases: Mapping[Role, Tensor]) -> Tensor:
        hidden, last = hidden_states.reshape(-1, self.hidden_dim), self.num_experts
        everywhere = torch.arange(len(hidden), device=hidden.device)
        activation = self._activation(last, hidden, self._base_gate_up(hidden), everywhere, biases).to(hidden.dtype)
        output = self.delta(last, "down")(activation)
        if "down" in biases:
            output = output + biases["down"]
        if self._uses_base(last, "down"):
            output = output + self._base_down(activation)
        return output.to(hidden_states.dtype).view_as(hidden_states)
