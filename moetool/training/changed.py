"""A model in training that computes with other weights than it holds, and runs its layers again on the way back."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moetool.calibration.blocks import OUTSIDE
from moetool.training.masters import LowRankUpdate, WeightChange
from moetool.training.weights import ModelWeights, put, tensor_of


class ChangedModel:
    """A model whose layers compute with changed weights.

    Of a pass only what enters each layer is kept, and on the way back the layer runs again, where transformers can
    run the family's layers again at all. What is made of a layer's weights is in memory while it runs.

    Attributes:
        model: as transformers runs it; in the mode that it was in.
    """

    def __init__(self, weights: ModelWeights, changes: Mapping[str, WeightChange], trained: Collection[str]) -> None:
        """Of `trained` tensors, by their names in memory, `changes` has some; others are trained themselves."""
        self.model, self._weights = weights.model, weights
        self._names = _by_layer(trained, weights.paths)
        self._changes = self._changes_by_layer(changes)
        for index in range(len(weights.paths)):
            layer = weights.layer(index)
            vars(layer)["forward"] = self._again(partial(self._run, index, layer.forward))

    @property
    def layers(self) -> range:
        """Numbers of the layers, and before them `OUTSIDE`."""
        return range(OUTSIDE, len(self._weights.paths))

    def _changes_by_layer(self, changes: Mapping[str, WeightChange]) -> dict[int, dict[str, WeightChange]]:
        """What changes the weights of each layer, by all names of these: tied ones have several."""
        of_tensor = {id(tensor_of(self.model, name)): change for name, change in changes.items()}
        parameters = self.model.named_parameters(remove_duplicate=False)
        every = {name: of_tensor[id(own)] for name, own in parameters if id(own) in of_tensor}
        return {
            layer: {name: every[name] for name in names}
            for layer, names in _by_layer(every, self._weights.paths).items()
        }

    def _again(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer's forward so that the layer runs once more in the backward pass."""
        if not self.model.supports_gradient_checkpointing:
            return run

        def forward(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*arguments, **named)
            return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=self.model.training, **named)

        return forward

    def _run(self, layer: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self.opened(layer):
            return forward(*arguments, **named)

    @contextmanager
    def opened(self, layer: int) -> Iterator[None]:
        """Context manager in which a layer, or what is outside of all, has its weights as they are trained."""
        with self._weights.opened(layer) if layer != OUTSIDE else nullcontext():
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

    def shapes(self, layer: int) -> dict[str, Tensor]:
        """Tensors without numbers, in place of those of `trained`."""
        return {name: tensor_of(self.model, name).to("meta") for name in self._names[layer]}

    @torch.no_grad()
    def trained(self, layer: int) -> dict[str, Tensor]:
        """What has been trained of a layer, or of what is outside of all, by its names in memory, on the processor."""
        with self.opened(layer) if self._names[layer] else nullcontext():
            return {name: tensor_of(self.model, name).detach().cpu() for name in self._names[layer]}

    @torch.no_grad()
    def round_to(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Have the model compute with what is trained as these dtypes hold it, by names in memory."""
        changes = {name: change for own in self._changes.values() for name, change in own.items()}
        for name, dtype in dtypes.items():
            if isinstance(change := changes.get(name), LowRankUpdate):
                change.stored = dtype
            elif change is None:
                own = tensor_of(self.model, name)
                own.copy_(own.to(dtype))

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of files, and as these hold them."""
        return self._weights.on_disk(tensors)


def _by_layer(names: Iterable[str], paths: Sequence[str]) -> dict[int, list[str]]:
    """Group names of tensors by the layer that they are in."""
    found: dict[int, list[str]] = {layer: [] for layer in range(OUTSIDE, len(paths))}
    starts = {f"{path}.": layer for layer, path in enumerate(paths)}
    for name in names:
        found[next((layer for start, layer in starts.items() if name.startswith(start)), OUTSIDE)].append(name)
    return found
