"""Modules that compiled graphs find by a number.

A graph takes tensors and numbers, not modules, and a kernel is one step of it: what the kernel chooses by, where
tensors lie and how many tokens an expert gets, is for the moment at which it runs.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from moetool.errors import UsageError

_MODULES: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Numbered(nn.Module):
    """A module that graphs find by its number as long as it lives.

    The number is an input of a compiled graph: one graph serves all layers that are compiled one by one.
    """

    _number: Tensor

    def take_number(self) -> None:
        """Register the module under a number that is unique in this process, and keep it as a CPU tensor."""
        number = next(_NUMBERS)
        _MODULES[number] = self
        with torch.inference_mode(False):
            self._number = torch.tensor(number, device="cpu")

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.take_number()  # a copy is another module


def refuse_export() -> None:
    """Raise for a graph that is to be run elsewhere, where no module has the number that stands in it.

    Raises:
        UsageError: `torch.export` is at work.
    """
    if torch.compiler.is_exporting():
        raise UsageError(
            "Experts that run on kernels cannot be exported: a graph holds tensors, and kernels want the module. Make "
            'compressed ones dense by moetool.synthesize(model) and model.set_experts_implementation("batched_mm").'
        )


def by_number(number: Tensor) -> Any:
    """Return the living module that is registered under a number. Raises `KeyError` if there is none."""
    return _MODULES[int(number)]


@torch.library.custom_op("moetool::experts", mutates_args=())
def run_by_number(hidden: Tensor, chosen: Tensor, weights: Tensor, number: Tensor) -> Tensor:
    """Custom operator that runs `infer` of the experts with this number, opaque to compiled graphs."""
    output: Tensor = by_number(number).infer(hidden, chosen, weights)
    return output


@run_by_number.register_fake
def _(hidden: Tensor, chosen: Tensor, weights: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("moetool::rows", mutates_args=())
def run_rows_by_number(rows: Tensor, number: Tensor, width: int) -> Tensor:
    """Custom operator that runs `infer` of the module with this number on rows `[…, in]`: `[…, width]`."""
    output: Tensor = by_number(number).infer(rows)
    return output


@run_rows_by_number.register_fake
def _(rows: Tensor, number: Tensor, width: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], width)
