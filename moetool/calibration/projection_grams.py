"""Second moments of what the linear modules of a layer are given, those of attention above all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moetool.calibration.observation import too_large
from moetool.calibration.peers import Peers
from moetool.calibration.sweep import Sweep
from moetool.numerics.halved_gram import HalvedGram


class ProjectionGrams:
    """Gram matrices of the inputs of linear modules, one for all modules that are given the same tensor, shrunk where
    the text tells little."""

    def __init__(self, layer: int, modules: Mapping[str, nn.Module], sweep: Sweep, device: torch.device) -> None:
        """Watch `modules` of a layer, by their paths, while the windows of a sweep pass."""
        self._layer, self._modules, self._device = layer, modules, device
        self._length, self._first, self._windows = sweep.length, sweep.own.start, len(sweep.own)
        self._owner: dict[str, str] = {}
        self._grams: dict[str, HalvedGram] = {}
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
            self._grams.setdefault(path, self._new(size)).reduce(peers.all_reduce)

    def shared(self) -> dict[str, list[str]]:
        """The modules that have run, by one of those that are given the same."""
        found: dict[str, list[str]] = {}
        for path, owner in self._owner.items():
            found.setdefault(owner, []).append(path)
        return found

    def __getitem__(self, path: str) -> Tensor:
        """`[in, in]`, of a module's inputs. Raises `InvalidInputError` where it overflows."""
        gram = self._grams[self._owner[path]].matrix()
        if not bool(gram.sum().isfinite()):
            raise too_large(f"Layer {self._layer} gives {path} numbers")
        return gram

    def _new(self, size: int) -> HalvedGram:
        return HalvedGram(size, self._length, self._first, self._device)

    def _see(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given = inputs[0]
        if path not in self._owner:
            shared = self._last is not None and self._last[1] is given
            self._owner[path] = self._last[0] if self._last is not None and shared else path
            if not shared:
                self._grams[path] = self._new(given.shape[-1])
        if self._owner[path] == path and self._grams[path].windows < self._windows:
            # A layer whose experts do not fit into memory together runs more than once.
            self._grams[path].add(given.flatten(0, -2))
        self._last = self._owner[path], given
