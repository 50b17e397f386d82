"""A model in training: how it computes with what is trained, and what of that is stored."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moetool.repair.masters import Master, WeightChange
from moetool.repair.weights import ModelWeights, put, tensor_of


class Trainee:
    """A model that computes with what its masters give.

    Of a pass only what enters each layer is kept, and on the way back the layer runs again, where transformers can
    run the family's layers again at all: in evaluation mode, without dropout and jitter of routers, which are not in
    the predictions to be met.

    Attributes:
        model: in evaluation mode.
        masters: by name of their parameters.
    """

    def __init__(self, weights: ModelWeights, masters: Mapping[str, Master]) -> None:
        self.model, self.masters, self._weights = weights.model, masters, weights
        self._names = _by_layer(masters, weights.paths)
        self._changes = self._changes_by_layer()
        for index in range(len(weights.paths)):
            layer = weights.layer(index)
            vars(layer)["forward"] = self._again(partial(self._run, index, layer.forward))

    def _changes_by_layer(self) -> dict[int, dict[str, WeightChange]]:
        """What changes the weights of each layer, by all names of these: tied ones have several."""
        changes = {name: master for name, master in self.masters.items() if isinstance(master, WeightChange)}
        of_tensor = {id(tensor_of(self.model, name)): change for name, change in changes.items()}
        parameters = self.model.named_parameters(remove_duplicate=False)
        every = {name: of_tensor[id(own)] for name, own in parameters if id(own) in of_tensor}
        return {
            layer: {name: every[name] for name in names}
            for layer, names in _by_layer(every, self._weights.paths).items()
        }

    def _again(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a layer, and once more on the way back."""
        if not self.model.supports_gradient_checkpointing:
            return run

        def forward(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*arguments, **named)
            return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, **named)

        return forward

    def _run(self, layer: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self._opened(layer):
            return forward(*arguments, **named)

    @contextmanager
    def _opened(self, layer: int) -> Iterator[None]:
        """Context manager in which a layer, or with −1 what is outside of all, has its weights as they are trained."""
        with self._weights.opened(layer) if layer >= 0 else nullcontext():
            changes = self._changes[layer]
            own = {name: tensor_of(self.model, name) for name in changes}
            try:
                made = dict[WeightChange, Tensor]()  # of tied ones once
                for name, change in changes.items():
                    if change not in made:
                        made[change] = change.made(own[name])
                    put(self.model, name, made[change])
                yield
            finally:
                for name, weight in own.items():
                    put(self.model, name, weight)

    def logits(self, windows: Tensor) -> Tensor:
        """Predictions `[windows, length, vocabulary]` of the tokens after those of `windows` `[windows, length]`."""
        with self._opened(-1):
            found: Tensor = self.model(input_ids=windows.to(self.model.device), use_cache=False).logits
            return found

    @torch.no_grad()
    def trained(self, layer: int) -> dict[str, Tensor]:
        """What has been trained of a layer, or with −1 of what is outside of all, by its names in memory, on the
        processor."""
        with self._opened(layer) if self._names[layer] else nullcontext():
            return {name: tensor_of(self.model, name).detach().cpu() for name in self._names[layer]}

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of files, and as these hold them."""
        return self._weights.on_disk(tensors)


def _by_layer(names: Iterable[str], paths: Sequence[str]) -> dict[int, list[str]]:
    """Names of tensors by the layer that they are in, −1 for none."""
    found: dict[int, list[str]] = {layer: [] for layer in range(-1, len(paths))}
    starts = {f"{path}.": layer for layer, path in enumerate(paths)}
    for name in names:
        found[next((layer for start, layer in starts.items() if name.startswith(start)), -1)].append(name)
    return found
