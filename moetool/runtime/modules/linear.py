"""Linear layers beside the experts of a compressed model, which read their matrix once per generated token."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.kernels import vector


class TokenLinear(nn.Linear):
    """`nn.Linear` in all but the time that one token takes in bf16 on a processor, which is half of torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`."""
        weight = self.weight
        is_eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined]
        if is_eager and vector.takes(input, weight) and (self.bias is None or self.bias.dtype == weight.dtype):
            return vector.linear(input, weight, self.bias)
        return F.linear(input, weight, self.bias)


def multiply_by_kernels(model: nn.Module) -> None:
    """Have the linear layers of a model, in place, multiply single tokens by kernels. Not those of other classes."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TokenLinear
