"""Routers of transformers' MoE families, whose classes have in common how they are called."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from moetool.runtime.modules.insertion import Routed

_NAMES = ("topkrouter", "tokenchoicerouter", "moev1gate")  # ends of the names of transformers' classes
# Of others, which return something else: they can be trained, but neither balanced nor taught what to choose.
_UNWATCHED = ("llama4router", "gemma4textrouter", "hashrouter", "zayarouter")
_CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")


def is_router(module: nn.Module) -> bool:
    """Whether a module is the router of an MoE layer, by the name of its class."""
    return type(module).__name__.lower().endswith(_NAMES)


def trained_routers(model: nn.Module) -> set[nn.Module]:
    """All routers of a model, also those whose choices `Routers` cannot watch."""
    others = (module for module in model.modules() if type(module).__name__.lower().endswith(_UNWATCHED))
    return {*_watched_routers(model), *others}


def _watched_routers(model: nn.Module) -> set[nn.Module]:
    own = (module.gate for module in model.modules() if isinstance(module, Routed))
    return {*own, *filter(is_router, model.modules())}


def is_choice_bias(name: str) -> bool:
    """Whether a tensor of that name is a bias that only the choice of experts sees, not the weights that they get."""
    return name.rpartition(".")[2] in _CHOICE_BIASES


def routed(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Logits `[tokens, experts]` and the experts taken `[tokens, k]`, where it says so, of what a router has returned.

    The order is logits, weights, experts; Granite's, in older versions, has it the other way round.
    """
    ordered = output if output[0].is_floating_point() else output[::-1]
    return ordered[0], ordered[2] if len(ordered) > 2 else None


class Routers:
    """The routers of a model that return their logits first, and what they said in the last forward pass.

    Attributes:
        modules: the routers themselves.
        logits: `[tokens, experts]` of each router, in the order in which they ran.
        chosen: `[tokens, k]`, the experts that each took, where it says so.
        ran: the routers in that order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.logits: list[Tensor] = []
        self.chosen: list[Tensor | None] = []
        self.ran: list[nn.Module] = []
        self._watching = False
        self.modules = _watched_routers(model)
        for module in self.modules:
            module.register_forward_hook(self._note)

    def __len__(self) -> int:
        return len(self.modules)

    def _note(self, router: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        # Gradient checkpointing runs layers a second time, outside of the block.
        if self._watching:
            self.ran.append(router)
            logits, chosen = (output, None) if isinstance(output, Tensor) else routed(output)
            self.logits.append(logits.reshape(-1, logits.shape[-1]))
            self.chosen.append(None if chosen is None else chosen.reshape(-1, chosen.shape[-1]))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager in which the logits and choices of every router are collected."""
        self.clear()
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def clear(self) -> None:
        """Drop the logits and choices that were collected in the last forward pass."""
        self.logits.clear()
        self.chosen.clear()
        self.ran.clear()
