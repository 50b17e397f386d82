"""Experts of one layer in plain tensors, as they run with and without gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from moetool.kernels.held import Held
from moetool.kernels.operands import UnsupportedMatrixError
from moetool.kernels.products import problem
from moetool.kernels.table import Table
from moetool.representations.operand import numbers
from moetool.runtime.modules.by_number import Numbered, refuse_export, run_by_number
from moetool.runtime.modules.inference import KernelExperts, RoleMatrices
from moetool.runtime.modules.offloading import is_fetched

_GATHERED = 32  # pairs of a token and an expert up to which matrices are copied rather than waited for


class Kernels:
    """The kernel form of one module, made when it is needed first and whenever tensors were replaced. Copies and files
    of the module begin with none: it is made of addresses."""

    def __init__(self) -> None:
        self._made: KernelExperts | None = None
        self._refused: Held | None = None

    def of(self, module: "RoutedExperts", chosen: Tensor | None = None) -> KernelExperts | None:
        """The kernels' form of `module`, for the experts that are `chosen` or for all, or None if kernels cannot run
        it: then its eager form has to."""
        # By local names: another thread may run the same module.
        if (made := self._made) is not None and made.is_current(chosen):
            return made
        if (refused := self._refused) is not None and refused.is_current():
            return None
        self.forget()
        # What is fetched for a call would be kept in memory by what was made.
        if problem(module.device) or any(map(is_fetched, module.holders())):
            return None
        with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
            try:
                made = self._made = module.on_kernels()
            except UnsupportedMatrixError:
                made, self._refused = None, Held(module.holders())
        return made

    def forget(self) -> None:
        """Drop the kernel form, whose addresses are about to become invalid."""
        self._made = self._refused = None

    def __deepcopy__(self, _: object) -> "Kernels":
        return Kernels()

    def __reduce__(self) -> tuple[type["Kernels"], tuple[()]]:
        return Kernels, ()


class RoutedExperts(Numbered, ABC):
    """Experts that are run by number: one after the other where gradients are wanted, and else on kernels. Where there
    are none for the device, matrices of few tokens may be copied: nothing waits for what was chosen.

    `forward` and all that takes its place: `[tokens, hidden]`, `[tokens, k]`, `[tokens, k]` → `[tokens, hidden]`.
    """

    down_proj: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._kernels = Kernels()
        self.take_number()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._kernels.forget()  # or what is moved stays where it was until the next call
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: object, **options: object) -> None:
        self._kernels.forget()
        super()._load_from_state_dict(*arguments, **options)

    @property
    def device(self) -> torch.device:
        """The device on which the experts' matrices lie."""
        return self.down_proj.device

    def holders(self) -> Iterable[nn.Module]:
        """Modules whose tensors the kernel form refers to: by default this one and all inside it."""
        return self.modules()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of what the experts of every token make of it, weighted."""
        if torch.is_grad_enabled() or not self.may_run_on_kernels():
            return self.eager(hidden_states, top_k_index, top_k_weights)
        if torch.compiler.is_compiling():
            refuse_export()
            return run_by_number(hidden_states, top_k_index, top_k_weights, self._number)
        return self.infer(hidden_states, top_k_index, top_k_weights)

    def kernel_form(self) -> KernelExperts | None:
        """All experts as kernels see them now; None if they cannot run them."""
        return self._kernels.of(self)

    def may_run_on_kernels(self) -> bool:
        """Unless transformers was told to have experts run one after the other, or a trace is made, which records
        nothing that is not torch."""
        told = getattr(getattr(self, "config", None), "_experts_implementation", None)
        return told != "eager" and not torch.jit.is_tracing()  # type: ignore[attr-defined]

    def infer(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run without gradients, and never as a step of a compiled graph: on kernels where there are some for what
        is stored, and where it is."""
        here = hidden_states.device == self.device
        if here and (kernels := self._kernels.of(self, top_k_index)) is not None:
            return kernels.forward(hidden_states, top_k_index, top_k_weights)
        if hidden_states.device.type != "cpu" and top_k_index.numel() <= _GATHERED:
            return self.gathered(hidden_states, top_k_index, top_k_weights)
        return self.eager(hidden_states, top_k_index, top_k_weights)

    @abstractmethod
    def on_kernels(self) -> KernelExperts:
        """The experts as kernels see them now.

        Raises:
            UnsupportedMatrixError: some matrix is nothing for them, or elsewhere.
        """

    def gathered(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run on copies of the matrices that every token chose, if they are such as can be copied at once."""
        return self.eager(hidden, chosen, weights)

    @abstractmethod
    def eager(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute the sum of routed experts in plain torch, one expert after the other."""


def matrices_of(holder: nn.Module, matrices: Sequence[Tensor], bias: Tensor | None = None) -> RoleMatrices:
    """All experts' matrices `[out, in]` of one role, in tensors of `holder`, and their `bias` [experts, out].

    Raises:
        UnsupportedMatrixError: their numbers are nothing for kernels, or elsewhere.
    """
    rows, columns = matrices[0].shape
    table = Table([((numbers(own),),) for own in matrices], (rows, columns), [holder])
    none = torch.zeros(len(matrices), 1, device=matrices[0].device)
    return RoleMatrices(table, None, (False,) * len(matrices), none, bias)
