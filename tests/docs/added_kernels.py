"""What docs/adding-kernels.md adds, against dense matrices: on a CPU, and run by itself in Triton's interpreter.

TRITON_INTERPRET=1 python tests/docs/added_kernels.py FOLDER_OF_THE_FILES
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from moetool.kernels.table import Table
from moetool.representations import parse_representation


def check(kernels: ModuleType, shape: tuple[int, int]) -> None:
    """Some tokens with the matrices that they chose, and many with the sum of one and a base."""
    generator = torch.Generator().manual_seed(0)
    form, weights = parse_representation("fp8"), []
    for _ in range(3):
        weight: Any = form.build(shape, torch.bfloat16, torch.device("cpu"))
        weight.load_state_dict(form.encode(torch.randn(shape, generator=generator), torch.bfloat16))
        weights.append(weight.requires_grad_(False))
    table = Table([weight.products() for weight in weights], shape, weights)
    for chosen in (torch.tensor([2, 0, 1]), torch.tensor([1, 2, 2, 0, 2, 2])):
        inputs = torch.randn(len(chosen), shape[1], generator=generator)
        wanted = torch.stack([weights[own](each) for own, each in zip(chosen.tolist(), inputs, strict=True)])
        torch.testing.assert_close(kernels.routed(table, chosen, inputs), wanted, rtol=1e-5, atol=1e-4)
    [operand] = [chain[0] for chain in table.products[0]]
    [base] = [chain[0] for chain in table.products[1]]
    found = unpacked(kernels, [operand, base], torch.eye(shape[1]), shape[0]).T
    torch.testing.assert_close(found, weights[0].dense() + weights[1].dense(), rtol=1e-6, atol=1e-6)


def unpacked(kernels: ModuleType, operands: list[Any], inputs: torch.Tensor, rows: int) -> torch.Tensor:
    """Inputs times the sum of operands, by whichever kernels."""
    if hasattr(kernels, "linear"):
        return kernels.linear(tuple((operand,) for operand in operands), inputs, rows)
    return kernels.unpacked_linear(operands, inputs)


def main(folder: str) -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # newer versions of NumPy refuse arrays of one number
        original(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched
    for room in ("representations", "compiled.forms", "kernels.forms"):
        importlib.import_module(f"moetool.{room}").__path__.append(f"{folder}/moetool/{room.replace('.', '/')}")
    for shape in ((16, 160), (9, 40)):
        check(importlib.import_module("moetool.kernels.card"), shape)


if __name__ == "__main__":
    main(sys.argv[1])
