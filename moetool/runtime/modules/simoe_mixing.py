"""Mixing of SIMoE's experts: the router, the α of the examples that are running, and what is kept per prompt."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any, ClassVar, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.runtime.cache_name import cache_in, cache_of
from moetool.runtime.modules.insertion import CustomLayer

# Calls that go on with a prompt's cache before its weights are folded, which costs about what as many calls save by it.
FOLDING = 4


class Site(Protocol):
    """Protocol of a linear layer whose delta is mixed from those of the experts."""

    @property
    def is_plain(self) -> bool:
        """Whether its weight is a matrix, which others can be added to."""

    def versions(self) -> tuple[object, ...]:
        """Return values that differ whenever a weight of the layer has changed, so that folded weights are made
        anew."""

    def gates(self, *, sampled: bool = False) -> Tensor:
        """Return the masks z `[experts, in]` of all experts; drawn at random with `sampled`."""

    def folded(self, alpha: Tensor) -> Tensor:
        """Compute the folded weight `W + W_δ diag(Σ_i α_i z_i)` `[out, in]` for mixing weights α `[experts]`."""


class Mixture:
    """The α `[examples, experts]` that some examples run with, and what was made of it for linear layers.

    Attributes:
        alpha: fp32.
        index: `[batch, length]`, the example of every token, where rows hold several.
        calls: how many went on with it since their thread ran anything else.
    """

    def __init__(self, alpha: Tensor, index: Tensor | None = None) -> None:
        self.alpha, self.index, self.calls = alpha, index, 0
        self._is_one: bool | None = None
        self._made: dict[tuple[str, int], tuple[object, Tensor]] = {}  # with the versions of what it was made of

    def __deepcopy__(self, _: object) -> Self:
        return type(self)(self.alpha, self.index)

    @property
    def is_one(self) -> bool:
        """Whether all examples have the same, to within the rounding of equal rows of a batch."""
        if self._is_one is None:
            self._is_one = len(self.alpha) == 1 or bool((self.alpha - self.alpha[:1]).abs().max() < 1e-6)
        return self._is_one

    def made(self, what: str, site: Site, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives for a linear layer, once for the same weights."""
        versions, key = site.versions(), (what, id(site))
        found = self._made.get(key)
        if found is None or found[0] != versions:
            found = self._made[key] = versions, make()
        return found[1]

    def forget(self) -> None:
        """Drop every folded weight; the mixing weights α stay."""
        self._made.clear()
        self.calls = 0

    @property
    def folded(self) -> int:
        """Number of layers whose folded weights are held."""
        return sum(what == "folded" for what, _ in self._made)


@dataclass
class _Here:
    """What one thread is about to run, or has run last.

    Attributes:
        prompt_ends: see `Interpolation`.
        mixture: of its last call.
        is_frozen: whether it runs the frozen model.
        has_gradients: whether its last call may be differentiated.
    """

    prompt_ends: Tensor | None = None
    mixture: Mixture | None = None
    is_frozen: bool = False
    has_gradients: bool = False


# No attributes of the module: models are copied, and threads are not.
_HERE: WeakKeyDictionary["Interpolation", WeakKeyDictionary[Thread, _Here]] = WeakKeyDictionary()
_LOCK = Lock()


class Interpolation(CustomLayer):
    """The router of a model, and the α of the examples that are running, which every thread has for itself.

    What counts as the prompt: of a batch with `prompt_ends`, what these say; of the first call that fills a cache, as
    in `generate`, everything there is, and the cache remembers its α; of any other call, which scores a text, its first
    token alone, since α must not depend on what is to be predicted. (`generate` without a cache is such calls.)

    Where all rows have one α, as those of one prompt do, beams included, calls that go on with a cache soon take the
    weights `W + W_δ diag(Σ_i α_i z_i)`, folded once per prompt: a token then costs what it costs the dense model. They
    lie beside W and W_δ, which others need, so that memory grows by the dense model's linear layers, for each thread
    that generates, until the thread begins another prompt or ends, training begins, or a weight changes.

    Compiled calls that go on with a cache mix in the graph, and never fold. A prompt runs uncompiled, as in `generate`,
    or breaks the graph.

    Attributes:
        trains_masks: whether masks are still parameters.
        sparsity: τ, the share of mask elements that is to be zero.
        samples: draw gates while training instead of taking their medians.
        folds: fold weights; `False` saves their memory.
        multiplier: λ of the sparsity constraint, kept with the training's checkpoints.
    """

    multiplier: Tensor
    kept_wide: ClassVar[tuple[str, ...]] = ("multiplier",)

    def __init__(
        self, hidden: int, experts: int, width: int, like: Tensor, *, trains_masks: bool, sparsity: float
    ) -> None:
        super().__init__()
        linear = partial(nn.Linear, device=like.device, dtype=like.dtype)
        self.first, self.second = linear(hidden, width), linear(width, experts)
        self.trains_masks, self.sparsity = trains_masks, sparsity
        if trains_masks:
            self.register_buffer("multiplier", torch.zeros(1, dtype=torch.float32, device=like.device))
        self.experts, self.samples, self.folds = experts, False, True
        self._held: Mixture | None = None
        self._compiled: Mixture | None = None

    @property
    def _here(self) -> _Here:
        """The state of this thread."""
        found = self._known()
        if found is None:
            with _LOCK:
                found = _HERE.setdefault(self, WeakKeyDictionary()).setdefault(current_thread(), _Here())
        return found

    def _known(self) -> _Here | None:
        threads = _HERE.get(self)
        return None if threads is None else threads.get(current_thread())

    @property
    def prompt_ends(self) -> Tensor | None:
        """`[batch, length]` bool, the last prompt token of every example of this thread's next call, rows of which may
        hold several, each beginning at position 0; used once."""
        return self._here.prompt_ends

    @prompt_ends.setter
    def prompt_ends(self, ends: Tensor | None) -> None:
        self._here.prompt_ends = ends

    @property
    def mixture(self) -> Mixture | None:
        """What this thread runs with or has run with last; `None` while the frozen model runs."""
        here = self._known()
        if here is not None and here.is_frozen:
            return None
        if self._held is not None:
            return self._held
        if here is not None:
            return here.mixture
        # A thread that has called nothing recomputes activations for the backward of one that has: autograd has threads
        # of its own on some devices.
        with _LOCK:
            others = list(_HERE.get(self, WeakKeyDictionary()).items())
        trained = [other.mixture for thread, other in others if thread.is_alive() and other.has_gradients]
        if len(trained) > 1:
            raise RuntimeError(
                f"{len(trained)} threads train this model at once, and recompute activations: whose they are cannot be "
                "told here. Train in one thread, or without gradient checkpointing."
            )
        return trained[0] if trained else None

    @property
    def alpha(self) -> Tensor | None:
        """`[examples, experts]` of this thread's last call; `None` while the frozen model runs."""
        return None if (mixture := self.mixture) is None else mixture.alpha

    def choose(self, hidden: Tensor) -> Tensor:
        """α `[examples, experts]` from the final hidden states `[examples, hidden]` of prompts' last tokens."""
        logits = self.second(F.silu(self.first(hidden.to(self.first.weight.dtype))))
        return logits.float().softmax(-1)

    def set_alpha(self, alpha: Tensor, index: Tensor | None = None) -> None:
        """Use these mixing weights α from now on in the calling thread, instead of those that the router finds."""
        self._use(Mixture(alpha, index))

    def _use(self, mixture: Mixture) -> None:
        here = self._here
        if here.mixture is not None and here.mixture is not mixture:
            here.mixture.forget()
        here.mixture, here.has_gradients = mixture, torch.is_grad_enabled()

    def train(self, mode: bool = True) -> Self:
        with _LOCK:
            known = list(_HERE.get(self, WeakKeyDictionary()).values())
        for here in known:
            if here.mixture is not None:
                here.mixture.forget()
        return super().train(mode)

    def folded_weight(self, site: Site) -> Tensor | None:
        """`W + W_δ diag(Σ_i α_i z_i)` `[out, in]` of a linear layer, where it pays to have it."""
        if not self.folds or self.training or torch.is_grad_enabled() or not site.is_plain:
            return None
        if torch.compiler.is_compiling() and self._compiled is not None:
            return None
        mixture = self.mixture
        if mixture is None or mixture.calls < FOLDING:
            return None
        return mixture.made("folded", site, lambda: site.folded(mixture.alpha[0]))

    def mixed(self, site: Site, like: Tensor) -> Tensor | None:
        """`Σ_i α_i z_i` of a linear layer, to be multiplied with its inputs: `[batch, length, in]`, with dimensions of
        1 between the first two, or all tokens of the batch one after the other, `[batch · length, in]`."""
        compiled = self._compiled if torch.compiler.is_compiling() else None
        mixture = compiled or self.mixture
        if mixture is None:
            return None
        alpha, index = mixture.alpha, mixture.index
        if torch.is_grad_enabled() or self.training or compiled is not None:
            mixed = mix(alpha, site.gates(sampled=self.samples and self.training))
        else:  # once per prompt
            mixed = mixture.made("mixed", site, lambda: mix(alpha, site.gates()))
        mixed = mixed.to(like.dtype)
        each = mixed[:, None] if index is None else mixed[index.to(mixed.device)]
        if like.dim() == 2:
            return each.expand(-1, len(like) // len(each), -1).flatten(0, 1)
        return each.unflatten(0, (-1, *[1] * (like.dim() - 3)))

    def hold(self, alpha: Tensor) -> None:
        """Use this α `[1, experts]` for everything from now on, in all threads."""
        self._held = Mixture(alpha)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The model as it was before: no deltas, in this thread, for the time of the `with` block."""
        here = self._here
        here.is_frozen = True
        try:
            yield
        finally:
            here.is_frozen = False

    def before(self, decoder: nn.Module, arguments: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
        """Find α for what the decoder is about to see (a forward pre-hook)."""
        self._compiled = self._begun(options) if torch.compiler.is_compiling() else None
        if self._compiled is not None:
            return
        here = self._here
        if here.is_frozen or self._held is not None:
            return
        ends, here.prompt_ends = here.prompt_ends, None
        cache = cache_in(options)
        if cache is not None and int(cache.get_seq_length()) > 0:
            if not hasattr(cache, "moetool_mixture"):
                raise RuntimeError("This cache was not begun by this model: its prompt's mixture is not known.")
            mixture: Mixture = cache.moetool_mixture
            self._use(mixture)
            mixture.calls += mixture.is_one
            return
        given = {"input_ids": arguments[0]} if arguments and arguments[0] is not None else {}
        given |= {
            name: options[name]
            for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
            if options.get(name) is not None
        }
        tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"][..., 0]
        index = None
        if ends is None and cache is None and "position_ids" in given:  # rows may hold several texts
            ends = given["position_ids"].expand_as(tokens) == 0
        if ends is None or not ends.any(1).all():
            ends = _ends(tokens, given, whole=cache is not None)
        else:
            starts = given["position_ids"].expand_as(tokens) == 0
            index = starts.flatten().cumsum(0).view_as(tokens) - 1
        mixture = Mixture(self.choose(self._seen(decoder, given, ends)), index)
        if cache is not None:
            cache.moetool_mixture = mixture
        self._use(mixture)

    def _begun(self, options: dict[str, Any]) -> Mixture | None:
        """The mixture that a step of a compiled graph goes on with: graphs know no threads, and do not ask how full a
        cache is."""
        if torch.is_grad_enabled() or self.training:
            return None
        cached: Mixture | None = getattr(cache_in(options), "moetool_mixture", None)
        return self._held or cached

    def after(self, decoder: nn.Module, arguments: tuple[Tensor | None, ...], outputs: object) -> None:
        """Let a cache that the decoder itself has made remember α (a forward hook)."""
        if torch.compiler.is_compiling() and self._compiled is not None:
            return
        cache = cache_of(outputs)
        if cache is not None and self._held is None and not self._here.is_frozen:
            cache.moetool_mixture = self._here.mixture

    @torch.no_grad()
    def _seen(self, decoder: nn.Module, given: Mapping[str, object], ends: Tensor) -> Tensor:
        """Final hidden states `[examples, hidden]` of the frozen model where `ends` says."""
        length = int(ends.any(0).nonzero().max()) + 1  # nothing after the last prompt is needed
        shortened = {name: _shortened(value, length) for name, value in given.items()}
        training = [module for module in decoder.modules() if module.training]
        if training:
            decoder.eval()
        try:
            with self.frozen():
                hidden = decoder.forward(**shortened, use_cache=False).last_hidden_state
        finally:
            for module in training:
                module.training = True
        return hidden[ends[:, :length].to(hidden.device)]


def mix(alpha: Tensor, gates: Tensor) -> Tensor:
    """`Σ_i α_i z_i` `[examples, channels]` in fp32, where the gates are: layers may be on several devices."""
    return alpha.to(gates.device) @ gates.float()


def _shortened(value: Any, length: int) -> Any:
    """The first tokens of `[batch, length, ...]`, or of an attention mask as generation prepares it: `[batch, 1,
    length, keys]`, perhaps one for each type of layer."""
    if isinstance(value, Mapping):
        return {kind: _shortened(mask, length) for kind, mask in value.items()}
    if value is None:
        return None
    return value[:, :, :length, :length] if value.dim() == 4 else value[:, :length]


def _ends(tokens: Tensor, given: Mapping[str, object], *, whole: bool) -> Tensor:
    """`[batch, length]` bool: of every row the last token that is not padding if the `whole` is a prompt, or the
    first."""
    mask = given.get("attention_mask")
    known = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    real = torch.ones_like(tokens, dtype=torch.bool) if known is None else known
    order = real.flip(1) if whole else real
    first = F.one_hot(order.int().argmax(1), tokens.shape[1]).bool()
    return first.flip(1) if whole else first


def interpolation_of(model: nn.Module) -> Interpolation | None:
    """Find the SIMoE router of a model; `None` if it has none."""
    return next((module for module in model.modules() if isinstance(module, Interpolation)), None)


def weigh_equally(model: nn.Module) -> None:
    """Give all experts of a SIMoE model equal weights, whatever the prompt is."""
    if (interpolation := interpolation_of(model)) is not None:
        interpolation.hold(torch.full((1, interpolation.experts), 1 / interpolation.experts, device="cpu"))
