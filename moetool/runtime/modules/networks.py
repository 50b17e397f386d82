"""The neurons of a dense feed-forward network, which may be computed a part at a time."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures.shape import Role
from moetool.kernels.operands import NUMBERS, UnsupportedMatrixError
from moetool.kernels.products import problem, routed
from moetool.kernels.table import Table
from moetool.representations.operand import numbers
from moetool.runtime.modules.fused import activated
from moetool.runtime.modules.insertion import CustomLayer

Runs = list[tuple[int, int]]  # of neurons that lie side by side: from, to


@dataclass(frozen=True, eq=False)
class KernelNeurons:
    """A feed-forward network's groups of neurons for kernels to choose from.

    Attributes:
        tables: of every role, of every group its matrix; that of the down matrix lies by neuron.
        biases: [groups, size] of the roles that have some, without the down matrix.
        centre: [groups, size], what is subtracted from activations.
        act_fn: the activation function.
    """

    tables: Mapping[Role, Table]
    biases: Mapping[Role, Tensor]
    centre: Tensor
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """`[tokens, hidden]` and the groups of every token `[tokens, k]` → `[tokens, hidden]` fp32. For few tokens:
        weights are read where they lie, and nothing waits for what was chosen."""
        pairs = chosen.reshape(-1)
        each = rows.float().repeat_interleave(chosen.shape[1], 0)
        values = []
        for role in (role for role in self.tables if role != "down"):
            value = routed(self.tables[role], pairs, each)
            values.append(value + self.biases[role][pairs] if role in self.biases else value)
        residual = activated(self.act_fn, values) - self.centre[pairs]
        return routed(self.tables["down"], pairs, residual).view(*chosen.shape, rows.shape[1]).sum(1)


class SplitFFN(CustomLayer):
    """A feed-forward network in `num_experts` groups of neurons, group k the neurons k·size to (k+1)·size.

    It gives `Σ (a − r) W2` over the groups that tokens use, with a the activations that W2 multiplies and r the buffer
    `centre [intermediate]`, zeros at first. The ways to compute it give the same, in different times.
    """

    centre: Tensor
    kept_wide: ClassVar[tuple[str, ...]] = ("centre",)

    def __init__(
        self,
        ffn: nn.Module,
        names: Mapping[Role, str],
        act_fn: Callable[[Tensor], Tensor],
        hidden: int,
        intermediate: int,
        experts: int,
    ) -> None:
        """Build around `ffn`, which holds the linear layers that `names` names by role and is not called itself.

        Raises:
            ValueError: the experts do not divide the neurons, or a matrix has another shape.
        """
        super().__init__()
        if experts < 1 or intermediate % experts:
            raise ValueError(f"{intermediate} neurons cannot be divided among {experts} experts of equal size")
        self.ffn, self.names, self.act_fn = ffn, dict(names), act_fn
        self.hidden, self.intermediate, self.num_experts = hidden, intermediate, experts
        self.size, self._stays = intermediate // experts, False
        self.is_joined = names.get("gate") == names["up"]
        for role in self.names:
            shape = (hidden, intermediate) if role == "down" else (intermediate * (1 + self.is_joined), hidden)
            if (found := tuple(self.linear(role).weight.shape)) != shape:
                raise ValueError(f"{self.names[role]} is {found}, not {shape}")
        down = self.linear("down").weight
        self.register_buffer("centre", torch.zeros(intermediate, device=down.device, dtype=wide(down)))
        self.register_state_dict_post_hook(_contiguous)

    def linear(self, role: Role) -> nn.Linear:
        """The layer of a role.

        Raises:
            TypeError: it is no linear layer any more, so that its weight is not all that it computes with.
        """
        linear = self.ffn.get_submodule(self.names[role])
        if not isinstance(linear, nn.Linear):
            kind, own = type(linear), [*dict.fromkeys(self.names.values())]
            raise TypeError(
                f"{self.names[role]} is a {kind.__module__}.{kind.__name__}: its neurons cannot be taken apart. Put "
                f"adapters on other layers: peft leaves these out with exclude_modules={own}."
            )
        return linear

    @property
    def subtracted(self) -> Tensor:
        """`centre` as it is computed with, in the dtype of the weights."""
        return self.centre.to(self.linear("down").weight.dtype)

    def whole(self, rows: Tensor) -> Tensor:
        """The network as it was, in the same operations: bit for bit what it gave."""
        up = self.linear("up")(rows)
        if "gate" not in self.names:
            return self.linear("down")(self.act_fn(up))
        gate, up = up.chunk(2, dim=-1) if self.is_joined else (self.linear("gate")(rows), up)
        return self.linear("down")(self.act_fn(gate) * up)

    def activation(self, rows: Tensor, runs: Runs) -> Tensor:
        """`a` of the neurons in `runs`, one after the other: `[tokens, neurons]`."""

        def project(role: Role) -> Tensor:
            weight, bias = self._neurons(role)
            columns = weight.t()
            if bias is None:
                parts = [torch.mm(rows, columns[:, start:stop]) for start, stop in runs]
            else:
                parts = [torch.addmm(bias[start:stop], rows, columns[:, start:stop]) for start, stop in runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

        return self._activated(project)

    def _activated(self, project: Callable[[Role], Tensor]) -> Tensor:
        return activated(self.act_fn, [project(role) for role in self.names if role != "down"])

    def _neurons(self, role: Role) -> tuple[Tensor, Tensor | None]:
        """The gate's or the up matrix `[intermediate, hidden]`, and its bias."""
        linear = self.linear(role)
        weight, bias = linear.weight, linear.bias
        if not self.is_joined:
            return weight, bias
        half = slice(self.intermediate, None) if role == "up" else slice(self.intermediate)
        return weight[half], None if bias is None else bias[half]

    def _runs(self, experts: list[int]) -> Runs:
        runs: Runs = []
        for expert in experts:
            start, stop = expert * self.size, (expert + 1) * self.size
            if runs and runs[-1][1] == start:
                runs[-1] = runs[-1][0], stop
            else:
                runs.append((start, stop))
        return runs

    def by_runs(self, rows: Tensor, experts: list[int], used: Tensor | None, index: Tensor | None = None) -> Tensor:
        """All tokens through the same experts, in views of the weights.

        `used [tokens, num_experts]` says which of them a token uses, all where it is None: → `[tokens, hidden]`. With
        `index`, the same experts on the device, nothing has to be copied there.
        """
        runs, weight = self._runs(experts), self.linear("down").weight
        index = torch.tensor(experts, device=rows.device) if index is None else index
        residual = self.activation(rows, runs) - self.subtracted.view(-1, self.size).index_select(0, index).flatten()
        if used is not None:
            unused = ~used.index_select(1, index).unsqueeze(-1)
            residual = residual.unflatten(-1, (-1, self.size)).masked_fill(unused, 0).flatten(-2)
        if len(rows) == 1 and weight.device.type == "cpu" and not torch.is_grad_enabled() and self._can_lie_by_neuron():
            # Columns are slow to read one part at a time; as rows, one call adds up those that are needed.
            neurons = index.unsqueeze(1) * self.size + torch.arange(self.size)
            values = residual.reshape(neurons.shape).to(weight.dtype)
            bags = F.embedding_bag(neurons, self._by_neuron(), mode="sum", per_sample_weights=values)
            return bags.sum(0, keepdim=True, dtype=wide(rows))
        parts = zip(residual.split([stop - start for start, stop in runs], dim=-1), runs, strict=True)
        sums = (F.linear(part, weight[:, slice(*run)]).to(wide(rows)) for part, run in parts)
        return functools.reduce(Tensor.add, sums)

    def by_expert(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Each expert on its tokens, one expert after the other; `chosen [tokens, k]`: → `[tokens, hidden]`."""
        experts, order = chosen.reshape(-1).sort(stable=True)
        ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0).tolist()
        weight, centre = self.linear("down").weight, self.subtracted
        result = rows.new_zeros(rows.shape, dtype=wide(rows))
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start == end:
                continue
            tokens, run = order[start:end] // chosen.shape[1], (expert * self.size, (expert + 1) * self.size)
            residual = self.activation(rows.index_select(0, tokens), [run]) - centre[slice(*run)]
            # Deterministic on every device: no token is twice among an expert's.
            result.index_add_(0, tokens, F.linear(residual, weight[:, slice(*run)]).to(result.dtype))
        return result

    def on_kernels(self) -> "KernelNeurons | None":
        """The network as it lies in memory now, the down matrix by neuron, if kernels can run it and there are some."""
        down = self.linear("down").weight
        if problem(down.device) or down.device.type != "cpu" or down.dtype not in NUMBERS:
            return None
        if not self._can_lie_by_neuron():
            return None
        shape, tables, biases = (self.num_experts, self.size), {}, {}
        for role in self.names:
            weight, bias = (self._by_neuron(), None) if role == "down" else self._neurons(role)
            parts = [replace(numbers(part), transposed=role == "down") for part in weight.detach().split(self.size)]
            out = (self.hidden, self.size) if role == "down" else (self.size, self.hidden)
            try:
                tables[role] = Table([((part,),) for part in parts], out, ())
            except UnsupportedMatrixError:
                return None
            if bias is not None:
                biases[role] = bias.detach().view(shape)
        return KernelNeurons(tables, biases, self.subtracted.view(shape), self.act_fn)

    def can_group(self, rows: Tensor) -> bool:
        """Whether grouped products have a kernel of their own for these: they need no sizes on the host."""
        aligned = self.size % 8 == 0 and self.hidden % 8 == 0 and self.intermediate % 8 == 0
        if not rows.is_cuda or torch.is_grad_enabled() or rows.dtype != torch.bfloat16 or not aligned:
            return False
        return torch.cuda.get_device_capability(rows.device) >= (9, 0)

    def grouped(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """All experts in one product per matrix, with nothing that waits for the device; as `by_expert`."""
        experts, order = chosen.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=rows.device), right=True).int()
        routed = rows.index_select(0, order // chosen.shape[1])

        def project(role: Role) -> Tensor:
            weight, bias = self._neurons(role)
            by_expert = weight.unflatten(0, (self.num_experts, self.size)).transpose(1, 2)
            output = F.grouped_mm(routed, by_expert, offs=ends)
            return output if bias is None else output + bias.view(self.num_experts, self.size)[experts]

        residual = self._activated(project) - self.subtracted.view(self.num_experts, self.size)[experts]
        down = self.linear("down").weight.unflatten(1, (self.num_experts, self.size)).permute(1, 2, 0)
        output = F.grouped_mm(residual, down, offs=ends)
        return torch.empty_like(output).index_copy_(0, order, output).view(*chosen.shape, -1).sum(1, dtype=wide(rows))

    def lie_by_rows(self, *, for_good: bool = False) -> None:
        """Lay the down matrix as on disk, as optimizers and FSDP take it: both hold more in that order.

        Args:
            for_good: whether it stays so, without the kernels that read it by neuron. FSDP fills the same memory anew
                in every pass.
        """
        self._stays |= for_good
        if not (down := self.linear("down").weight).is_contiguous():
            with torch.inference_mode(False):
                down.data = down.data.contiguous()

    def _can_lie_by_neuron(self) -> bool:
        """Whether the down matrix lies by neuron, or may be laid so."""
        down = self.linear("down").weight
        return down.t().is_contiguous() or not (self._stays or down.is_inference())

    def _by_neuron(self) -> Tensor:
        """W2 as `[intermediate, hidden]`, contiguous: from then on it lies so in memory, in the shape that it had."""
        weight = self.linear("down").weight
        if not weight.t().is_contiguous():
            with torch.inference_mode(False), torch.no_grad():
                weight.data = weight.data.t().contiguous().t()
        return weight.t()


def wide(tensor: Tensor) -> torch.dtype:
    """The wider of a tensor's dtype and fp32, in which sums are accumulated."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _contiguous(module: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    """Weights that lie in memory otherwise are saved as they lay: files hold nothing else."""
    for name, tensor in state.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and not tensor.is_contiguous():
            state[name] = tensor.contiguous()


def dropout_of(ffn: nn.Module) -> float:
    """The probability of dropout on what a feed-forward network gives."""
    if isinstance(module := getattr(ffn, "dropout", None), nn.Dropout):
        return module.p
    return float(getattr(ffn, "residual_dropout", 0.0))
