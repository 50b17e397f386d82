"""Training of the experts alone that a task uses (expert-specialized fine-tuning, ESFT, arXiv:2407.01906).

Which experts these are follows from the examples: of each layer the fewest that together get a given share of the
choices of the examples' tokens (the paper's token selection ratio, over all tokens alike). All other experts, the
routers and everything else stay as they are, to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.errors import UsageError
from moetool.job.job import Job
from moetool.job.progress import phase
from moetool.kernels.rounding import exact_products
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import CustomLayer, experts_per_token
from moetool.runtime.modules.routers import Routers, is_router
from moetool.tune.costs import CHOOSE, COUNTED, COUNTED_AT_ONCE
from moetool.tune.examples import Example, collate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TaskLayer:
    """The experts of one MoE layer in a model of transformers.

    Attributes:
        name: the layer's module.
        router: that chooses among them.
        experts: holds their weights, as tensors `[experts, …]` or as one module for each.
    """

    name: str
    router: nn.Module
    experts: nn.Module

    @property
    def count(self) -> int:
        """Number of experts that have weights; a router may choose others, too."""
        experts: Any = self.experts
        return len(experts if isinstance(experts, nn.ModuleList) else experts.down_proj)


def train_task_experts(job: Job[Any], model: "PreTrainedModel", examples: Sequence[Example], share: float) -> int:
    """Let only those experts learn that get `share` of the choices of the examples' tokens; returns the number of
    their elements.

    Raises:
        UsageError: the model has no experts, or has them in another form than transformers.
    """
    layers = routed_experts(model)
    model.to(job.device)
    batches = list(_batches(examples))
    with phase(job.progress, CHOOSE, len(batches), "batches"):
        counts = job.ranks.broadcast(count_choices(job, model, layers, batches))
    chosen = {name: most_chosen(own, share) for name, own in counts.items()}
    learning, every = sum(int(own.sum()) for own in chosen.values()), sum(map(len, chosen.values()))
    job.progress.log(f"{learning} of {every} experts get {share:.0%} of their layer's choices, and learn.")
    model.requires_grad_(False)
    return sum(_let_learn(layer.experts, chosen[layer.name]) for layer in layers)


def routed_experts(model: nn.Module) -> list[TaskLayer]:
    """Find the MoE layers of a model, in the order of its modules. Raises as `train_task_experts`."""
    own = next((module for module in model.modules() if isinstance(module, (SharedBaseExperts, CustomLayer))), None)
    found = [] if own is not None else list(_layers(model))
    if not found:
        has = "none" if own is None else "experts in a form of moetool's own, which --train experts trains"
        raise UsageError(f"--train task-experts takes experts as transformers stores them: this model has {has}.")
    return found


def _layers(model: nn.Module) -> Iterator[TaskLayer]:
    for name, module in model.named_modules():
        router = next((child for child in module.children() if is_router(child)), None)
        experts = getattr(module, "experts", None)
        if router is not None and isinstance(experts, nn.Module):
            yield TaskLayer(name, router, experts)


@torch.no_grad()
@exact_products()
def count_choices(
    job: Job[Any], model: "PreTrainedModel", layers: Sequence[TaskLayer], batches: Sequence[Sequence[Example]]
) -> Mapping[str, Tensor]:
    """Count, by layer, how often each expert is chosen by tokens of batches of examples: `[experts]`, int64."""
    routers, top_k = Routers(model), experts_per_token(model)
    known = {layer.router: layer for layer in layers}
    counts: dict[str, Tensor] = {}
    model.eval()
    for batch in batches:
        job.interrupt.check()
        given = {name: tensor.to(model.device) for name, tensor in collate([[example] for example in batch]).items()}
        real = given["real"].flatten()
        with routers.watched():
            model(input_ids=given["input_ids"], position_ids=given["position_ids"], use_cache=False)
        for router, logits, taken in zip(routers.ran, routers.logits, routers.chosen, strict=True):
            if (layer := known.get(router)) is not None:
                chosen = (logits.topk(top_k).indices if taken is None else taken)[real]
                own = F.one_hot(chosen, logits.shape[-1]).sum((0, 1)).cpu()[: layer.count]
                counts[layer.name] = counts.get(layer.name, torch.zeros_like(own)) + own
        job.progress.advance()
    routers.clear()
    model.train()
    return counts


def _batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Batches of examples, in their order, until `COUNTED` tokens are reached."""
    batch: list[Example] = []
    tokens = 0
    for example in examples:
        batch.append(example)
        tokens += len(example.ids)
        if len(batch) * max(len(own.ids) for own in batch) >= COUNTED_AT_ONCE or tokens >= COUNTED:
            yield batch
            batch = []
        if tokens >= COUNTED:
            return
    if batch:
        yield batch


def most_chosen(counts: Tensor, share: float) -> Tensor:
    """Mark the fewest experts that together have at least `share` of all choices: `[experts]` bool, from their counts.

    Of experts with as many choices the first is taken; one is always marked.
    """
    order = counts.argsort(descending=True, stable=True)
    reached = counts[order].cumsum(0).double() >= share * counts.sum() - 1e-9
    marked = torch.zeros_like(counts, dtype=torch.bool)
    marked[order[: int(reached.int().argmax()) + 1]] = True
    return marked


def _let_learn(experts: nn.Module, chosen: Tensor) -> int:
    """Let the chosen experts of a layer require gradients, or have gradients of zero elsewhere in tensors that all
    experts share; returns the number of their elements."""
    numbers = 0
    if isinstance(experts, nn.ModuleList):
        for number in chosen.nonzero().flatten().tolist():
            experts[number].requires_grad_(True)
            numbers += sum(parameter.numel() for parameter in experts[number].parameters())
        return numbers
    for parameter in experts.parameters():
        if parameter.is_floating_point() and parameter.ndim > 1 and len(parameter) == len(chosen):
            parameter.requires_grad_(True)
            mask = chosen.to(parameter.device, parameter.dtype).view(-1, *[1] * (parameter.ndim - 1))
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask)
            numbers += int(chosen.sum()) * parameter[0].numel()
    return numbers
