"""Linear layers and embeddings beside the experts that are stored as codes, and run on these."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn

from moetool.format.kinds.base import PLACEHOLDER
from moetool.kernels.operands import MOST_NUMBERS, UnsupportedMatrixError
from moetool.kernels.products import linear, problem, routed
from moetool.kernels.table import Table
from moetool.representations.quantized import WHOLE, QuantizedWeight
from moetool.runtime.modules.by_number import Numbered, run_rows_by_number
from moetool.runtime.modules.coded_weight import CodedWeight, Placeholder, placeholder_of
from moetool.runtime.modules.inference import few_tokens
from moetool.runtime.modules.offloading import is_fetched, loaded

if TYPE_CHECKING:
    pass

_MOST = MOST_NUMBERS // 2  # in a table: heads are larger


class QuantizedModule(nn.Module, ABC):
    """A module whose one matrix is stored as codes. To others it is the ordinary module that it stands for.

    Attributes:
        is_filled: its tensors are loaded, so that `weight` can be read.
        tied: modules that use its matrix, too.
    """

    is_filled = False
    _owner: "tuple[QuantizedModule, ...]" = ()

    def _begin(self, stored: QuantizedWeight, owner: "QuantizedModule | None") -> None:
        """Around an empty matrix, its own or that of an `owner` it is tied to."""
        nn.Module.__init__(self)
        self._is_hf_initialized = True  # transformers' initialization would take the placeholder for the matrix
        self.tied: list[QuantizedModule] = []
        if owner is None:
            self.moetool, like = stored, stored.scales
            placeholder = torch.zeros(PLACEHOLDER, dtype=like.dtype, device=like.device)
            self.register_parameter("weight", nn.Parameter(placeholder, requires_grad=False))
        else:
            # Not as a module of its own, so that what is tied is saved, moved and counted once.
            self._owner = (owner,)
            self.register_parameter("weight", owner._parameters["weight"])
            owner.tied.append(self)

    @property
    def weight(self) -> nn.Parameter:
        """The matrix `[out, in]`, see `CodedWeight`; the placeholder that is on disk while the codes are not in memory,
        not loaded yet, offloaded, or held in parts by several processes."""
        if (placeholder := placeholder_of(self._parameters.get("weight"))) is None:
            raise AttributeError("weight")
        is_here = self.is_filled and not placeholder.is_meta and not hasattr(placeholder, "device_mesh")
        return CodedWeight.of(self, placeholder) if is_here else placeholder

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `nn.Module`; a matrix in the place of the placeholder, as by `tie_weights`, makes it an ordinary one."""
        param = placeholder_of(param)
        if name == "weight" and self.is_filled and param is not None and (*param.shape,) != PLACEHOLDER:
            self._turn_dense(param)
        else:
            super().register_parameter(name, param)
            self._keep_placeholder()

    def _keep_placeholder(self) -> None:
        Placeholder.become(self._parameters.get("weight"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._keep_placeholder()
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        """A copy. A module that is copied by itself, as for `modules_to_save` of peft, becomes an ordinary one, whose
        whole matrix can be trained: codes take no gradients, and a tied module's are another's."""
        is_alone, state = not memo, self.__getstate__()
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy({**state, "tied": [], "_owner": ()} if is_alone else state, memo))
        if is_alone:
            made._turn_dense(self.matrix())
        return made

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._keep_placeholder()

    @property
    def stored(self) -> QuantizedWeight:
        """The codes and scales of the matrix, which may belong to a module that this one is tied to."""
        return self._owner[0].stored if self._owner else self.moetool

    @property
    def is_tied(self) -> bool:
        """Whether the module shares the matrix of another module, as a head does with the embeddings."""
        return bool(self._owner)

    def matrix_shape(self) -> tuple[int, int]:
        """Return the shape `[out, in]` of the matrix, without decoding it."""
        return self.stored.shape

    def decoded(self) -> Tensor:
        """The matrix in numbers, through which gradients reach the scales."""
        with loaded(self.stored):
            return self.stored.dequantize(self.stored.scales.dtype)

    def become_dense(self, matrix: nn.Parameter) -> None:
        """Be an ordinary module of this matrix from now on, together with what is tied."""
        if self.is_tied:
            self._owner[0].become_dense(matrix)
        else:
            for module in (*self.tied, self):
                module._turn_dense(matrix)

    def _turn_dense(self, matrix: nn.Parameter) -> None:
        kind = self.ordinary
        for name in ("moetool", "tied", "_tables", "_number", "_owner", "_native", "is_filled"):
            if name in self._modules or name in self.__dict__:
                delattr(self, name)
        self.__class__ = kind  # type: ignore[assignment]
        self._parameters["weight"] = matrix

    @property
    @abstractmethod
    def ordinary(self) -> type[nn.Module]:
        """The class of the module that it stands for."""

    @abstractmethod
    def dense(self, matrix: nn.Parameter) -> nn.Module:
        """The ordinary module, of the matrix `[out, in]` that its codes stand for."""

    @torch.no_grad()
    def matrix(self) -> nn.Parameter:
        """Decode the matrix into a new parameter, in the model's dtype and on its device."""
        return nn.Parameter(self.stored.dequantize(self.stored.scales.dtype))


class QuantizedEmbedding(QuantizedModule, nn.Embedding):  # type: ignore[misc]
    """Embedding with a quantized matrix, of which only the rows that are looked up are decoded.

    What the embeddings of a family do besides (Gemma's multiply, Inkling's normalize), their own class does. Its parts
    are this module's.
    """

    def __init__(self, stored: QuantizedWeight, native: nn.Embedding, owner: QuantizedModule | None = None) -> None:
        """In the place of `native`, with a matrix `[vocabulary, hidden]` of its own or of an `owner` it is tied to."""
        self._begin(stored, owner)
        for name, value in vars(native).items():
            self.__dict__.setdefault(name, value)
        self.num_embeddings, self.embedding_dim = stored.shape
        # One dictionary for both, so that the native module sees what is moved or replaced in this one.
        self._modules.update(native._modules)
        self._buffers.update(native._buffers)
        self._non_persistent_buffers_set |= native._non_persistent_buffers_set
        native._modules, native._buffers = self._modules, self._buffers
        native.padding_idx = None  # rows that were looked up have other numbers
        self._native = (native,)  # not as a module

    @property
    def ordinary(self) -> type[nn.Module]:
        return type(self._native[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and decode the rows of token ids `[…]`: `[…, hidden]`."""
        with loaded(self.stored):
            rows = self.stored.rows(tokens)
        if self.ordinary is nn.Embedding:
            return rows
        numbers = torch.arange(tokens.numel(), device=rows.device).view(tokens.shape)
        looked_up = {"weight": rows.reshape(-1, self.embedding_dim)}
        return cast(Tensor, torch.func.functional_call(self._native[0], looked_up, numbers))

    def fill(self, initialize: Callable[[nn.Module], None]) -> None:
        """Set the buffers that no file has, by the initialization of the model's family."""
        if unsaved := [self._buffers[name] for name in self._non_persistent_buffers_set]:
            initialize(self._native[0])
            for buffer in unsaved:
                buffer._is_hf_initialized = True  # type: ignore[union-attr]

    def dense(self, matrix: nn.Parameter) -> nn.Embedding:
        [native] = self._native
        native.num_embeddings, native.embedding_dim = self.num_embeddings, self.embedding_dim
        native.padding_idx = self.padding_idx
        native._modules = {name: module for name, module in self._modules.items() if name != "moetool"}
        native.weight = matrix
        return native.train(self.training)


class QuantizedLinear(Numbered, QuantizedModule, nn.Linear):  # type: ignore[misc]
    """A linear layer on a matrix of codes: on kernels where no gradients are wanted, else in plain torch."""

    @property
    def ordinary(self) -> type[nn.Module]:
        return nn.Linear

    def __init__(
        self, stored: QuantizedWeight, bias: nn.Parameter | None, owner: QuantizedModule | None = None
    ) -> None:
        """Around an empty matrix `[out, in]`, its own or that of an `owner` it is tied to."""
        self._begin(stored, owner)
        self.out_features, self.in_features = stored.shape
        self.register_parameter("bias", bias)
        self._tables: list[Table] = []
        self.take_number()

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs `[…, in]` with the quantized matrix and add the bias: `[…, out]`."""
        output = self._times(inputs.reshape(-1, self.in_features)).view(*inputs.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def _times(self, inputs: Tensor) -> Tensor:
        traced = torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        if torch.is_grad_enabled() or traced or torch.is_autocast_enabled(inputs.device.type):
            return cast(Tensor, self.stored(inputs))
        if torch.compiler.is_compiling():
            return run_rows_by_number(inputs, self._number, self.out_features)
        return self.infer(inputs)

    def infer(self, inputs: Tensor) -> Tensor:
        """`[tokens, in]` → `[tokens, out]` without gradients, without the bias, and never as a step of a compiled
        graph: on kernels where there are some."""
        if not (tables := self._on_kernels(inputs.device)):
            return cast(Tensor, self.stored(inputs))
        if len(inputs) <= few_tokens(tables[0]):
            only = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
            outputs = [routed(table, only, inputs).to(inputs.dtype) for table in tables]
        else:
            outputs = [linear(table.products[0], inputs, table.shape[0]) for table in tables]
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, 1)

    def _on_kernels(self, device: torch.device) -> list[Table]:
        """The matrix as kernels see it now, some of its rows in a table each; empty if they cannot multiply by it."""
        stored = self.stored
        if not self._tables or not all(table.is_current() for table in self._tables):
            self._tables = []
            if not (problem(stored.codes.device) or is_fetched(stored)):
                with torch.inference_mode(False), torch.no_grad():
                    self._tables = _tables(stored)
        return self._tables if device == stored.codes.device else []

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tables": []}  # which is made of addresses

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._tables = []  # or what is moved stays where it was until the next call
        return super()._apply(fn, recurse)

    def dense(self, matrix: nn.Parameter) -> nn.Linear:
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = matrix
        layer.register_parameter("bias", self.bias)
        return layer.train(self.training)


def _tables(stored: QuantizedWeight) -> list[Table]:
    """The kernels' tables of its rows; empty for what no kernel runs."""
    whole, (rows, columns), found = stored.operand(), stored.shape, []
    step = max(1, _MOST // columns) if stored.bits == WHOLE else rows  # rows that share bytes stay together
    for codes, scales in zip(stored.codes.split(step * columns), stored.scales.split(step), strict=True):
        shape = len(scales), columns
        try:
            found.append(Table([((replace(whole, shape=shape, data=codes, scales=scales),),)], shape, [stored]))
        except UnsupportedMatrixError:
            return []
    return found
