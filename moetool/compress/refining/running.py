"""What every refinement does: experts of given matrices, and batches of tokens."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from moetool.architectures import MoEShape, Role
from moetool.calibration.held_experts import HeldExperts


def run_expert(
    native: nn.Module, shape: MoEShape, expert: int, matrices: Mapping[Role, Tensor], inputs: Tensor
) -> Tensor:
    """An expert of these matrices on `[tokens, hidden]`; `native` are transformers' fused experts, for their biases and
    activation function."""
    entering = torch.cat([matrices[role] for role in shape.entering]).unsqueeze(0)
    held = HeldExperts(native, range(expert, expert + 1), entering, matrices["down"].unsqueeze(0))
    return held.run(expert, inputs).output


def batches(tokens: int, most: int, steps: int, stream: torch.Generator) -> Iterator[Tensor]:
    """Rows of some tokens for every step, at most so many: all once, in any order, before one comes again."""
    left = torch.empty(0, dtype=torch.int64)
    size = min(most, tokens)
    for _ in range(steps):
        if len(left) < size:
            left = torch.randperm(tokens, generator=stream)
        rows, left = left[:size], left[size:]
        yield rows
