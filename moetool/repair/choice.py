"""Choice of the parameters that repair trains: those that cost no byte, whatever their values are."""

from typing import TYPE_CHECKING, Literal

from torch import nn

from moetool.errors import UsageError
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import is_placeholder
from moetool.runtime.modules.quantized import quantized_modules
from moetool.runtime.modules.routers import Routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def choose(model: "PreTrainedModel", train: Literal["small", "all"]) -> dict[str, nn.Parameter]:
    """Let norms, biases, routers, scales of codes, low-rank factors and shared bases require gradients, and nothing
    else; with `all` also attention and experts that are stored in full. Embeddings and the head stay as they are.

    Returns:
        The trained parameters by their names in memory.

    Raises:
        UsageError: the model has none.
    """
    modules: list[nn.Module] = [*Routers(model).modules]
    modules += [module.stored for _, module in quantized_modules(model)]
    ends = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    chosen = {id(parameter) for module in modules for parameter in module.parameters()}
    for module in model.modules():
        if isinstance(module, SharedBaseExperts):
            chosen |= {id(parameter) for parameter in (*module.moetool.parameters(), *module.base_parameters())}
    model.requires_grad_(False)
    found = {}
    for name, parameter in model.named_parameters():
        if is_placeholder(parameter) or not parameter.is_floating_point():
            continue
        in_full = train == "all" and not any(parameter is end for end in ends)
        if id(parameter) in chosen or parameter.dim() == 1 or in_full:
            parameter.requires_grad_(True)
            found[name] = parameter
    if not found:
        raise UsageError("This model has no norms, routers, scales or factors that could be trained.")
    return found
