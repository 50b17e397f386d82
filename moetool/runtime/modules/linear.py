"""Linear layers beside the experts of a compressed model, which read their matrix once per generated token."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.kernels import cpu, vector

_FEWEST = 4  # tokens from which on it pays to write a matrix out in fp32


class TokenLinear(nn.Linear):
    """`nn.Linear` in all but its time in 16 bits on a processor: half of torch's for one token, and an eighth for many
    where the processor has no products of 16-bit numbers."""

    def forward(self, input: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`."""
        weight = self.weight
        is_eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined]
        if is_eager and vector.takes(input, weight) and (self.bias is None or self.bias.dtype == weight.dtype):
            return vector.linear(input, weight, self.bias)
        if is_eager and _converts(input, weight):
            return _converted(input, weight, self.bias)
        return F.linear(input, weight, self.bias)


def _converts(input: Tensor, weight: Tensor) -> bool:
    """Whether fp32 products are faster: of at least some tokens, on a processor without products of their dtype."""
    return (
        input.device.type == weight.device.type == "cpu"
        and input.dtype == weight.dtype
        and input.numel() >= _FEWEST * weight.shape[1]
        and type(input) is Tensor
        and type(weight) is nn.Parameter
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and cpu.lacks_products(weight.dtype)
    )


def _converted(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer `x W^T + b` computed in fp32 and rounded once to the dtype of `x`: `[…, in]` → `[…, out]`."""
    found = cpu.converted_linear(input.reshape(-1, weight.shape[1]).float(), weight)
    if bias is not None:
        found += bias
    output = input.new_empty(len(found), weight.shape[0]).copy_(found)
    return output.view(*input.shape[:-1], weight.shape[0])


def multiply_by_kernels(model: nn.Module) -> None:
    """Have the linear layers of a model, in place, multiply as `TokenLinear` does. Not those of other classes, nor
    those without inputs, which a shared expert of no width has."""
    for module in model.modules():
        if type(module) is nn.Linear and module.in_features:
            module.__class__ = TokenLinear
