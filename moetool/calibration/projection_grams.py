"""Second moments of what the linear modules of a layer are given, those of attention above all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moetool.calibration.input_grams import GRAM_DTYPE
from moetool.calibration.peers import Peers
from moetool.numerics.gram import Gram


class ProjectionGrams:
    """Gram matrices of the inputs of linear modules, one for all modules that are given the same tensor."""

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._modules, self._device = modules, device
        self._owner: dict[str, str] = {}
        self._grams: dict[str, Gram] = {}
        self._last: tuple[str, Tensor] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which the inputs of the watched modules are added to their Gram matrices."""
        handles = [module.register_forward_pre_hook(partial(self._see, path)) for path, module in self._modules.items()]
        try:
            yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def reduce(self, peers: Peers) -> None:
        """Add up what each process has seen of the windows that are its own, which may be none."""
        seen = peers.gather((self._owner, {path: gram.size for path, gram in self._grams.items()}))
        self._owner, sizes = next((own for own in seen if own[0]), seen[0])
        for path, size in sizes.items():
            gram = self._grams.setdefault(path, Gram(size, self._device, GRAM_DTYPE))
            peers.all_reduce(gram.matrix())

    def shared(self) -> dict[str, list[str]]:
        """The modules that have run, by one of those that are given the same."""
        found: dict[str, list[str]] = {}
        for path, owner in self._owner.items():
            found.setdefault(owner, []).append(path)
        return found

    def __getitem__(self, path: str) -> Tensor:
        """`[in, in]`, of a module's inputs."""
        return self._grams[self._owner[path]].matrix()

    def _see(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given = inputs[0]
        if path not in self._owner:
            shared = self._last is not None and self._last[1] is given
            self._owner[path] = self._last[0] if self._last is not None and shared else path
            if not shared:
                self._grams[path] = Gram(given.shape[-1], self._device, GRAM_DTYPE)
        if self._owner[path] == path:
            self._grams[path].add(given.flatten(0, -2))
        self._last = self._owner[path], given
