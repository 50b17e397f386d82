"""Balance without a loss: biases that only the choice of experts sees, moved after every step.

The bias of an expert that was chosen more often than the mean of its layer falls by a fixed rate, that of one chosen
less often rises (Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2). So no gradient works
against that of the text.
"""

import re
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moetool.architectures.described import language_model_in
from moetool.errors import UsageError
from moetool.runtime.modules.routers import Routers, is_choice_bias
from moetool.tune.balance import Sum

_LAYER = re.compile(r"^.*?\.(?:layers?|h)\.\d+\.")


def choice_biases(model: nn.Module) -> dict[str, Tensor]:
    """Biases `[experts]`, or `[1, experts]`, that a model adds to its routers' scores to choose experts, by name."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if is_choice_bias(name)}


def router_biases(model: PreTrainedModel, routers: Routers) -> Mapping[nn.Module, Tensor]:
    """The bias beside each router of the language model, that of its layer.

    Raises:
        UsageError: a router has none.
    """
    biases = {_layer(name): tensor for name, tensor in choice_biases(model).items()}
    path, language = language_model_in(model)
    named = language.named_modules(prefix=path)
    own = {module: _layer(name) for name, module in named if module in routers.modules}
    if not own or not biases.keys() >= {*own.values()}:
        raise UsageError("--balance-bias: a router of this model has no bias that only the choice of experts sees.")
    return {module: biases[layer] for module, layer in own.items()}


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found[0]


class BiasBalance(TrainerCallback):
    """Counts which experts are chosen in a step, and moves the biases after it."""

    def __init__(self, model: PreTrainedModel, routers: Routers, rate: float) -> None:
        """With a `rate` by which a bias moves in a step.

        Raises:
            UsageError: a router has no bias.
        """
        router_biases(model, routers)
        self._model, self._routers, self._rate = model, routers, rate
        self._counts: dict[nn.Module, Tensor] = {}

    def count(self, real: Tensor, over_processes: Sum) -> None:
        """Count the choices of real tokens `[tokens]` in the forward pass that the routers have just seen.

        Raises:
            UsageError: they do not say which experts they have chosen.
        """
        for router, logits, chosen in zip(self._routers.ran, self._routers.logits, self._routers.chosen, strict=True):
            if chosen is None:
                raise UsageError("--balance-bias: this model's routers do not say which experts they choose.")
            found = over_processes(torch.bincount(chosen[real].flatten(), minlength=logits.shape[-1]).float())
            self._counts[router] = self._counts.get(router, 0) + found

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        biases = router_biases(self._model, self._routers)  # which the Trainer may have moved to another device
        for router, counts in self._counts.items():
            bias = biases[router]
            bias += self._rate * (counts.mean() - counts).sign().view(bias.shape).to(bias)
        self._counts.clear()
