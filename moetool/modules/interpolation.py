"""How SIMoE's experts are mixed: the router, the α of the examples that are running, and what is kept per prompt."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.modules.insertion import OwnModule

if TYPE_CHECKING:
    from moetool.modules.interpolated import InterpolatedLinear

# Calls that go on with a prompt's cache before its weights are folded, which costs about what as many calls save by it.
FOLDING = 4


class Interpolation(OwnModule):
    """The router of a model, and the α of the examples that are running.

    What counts as the prompt: of a batch with `prompt_ends`, what these say; of the first call that fills a cache, as
    in `generate`, everything there is, and the cache remembers its α; of any other call, which scores a text, its first
    token alone, since α must not depend on what is to be predicted. (`generate` without a cache is such calls.)

    Where all rows have one α, as those of one prompt do, beams included, calls that go on with a cache soon take the
    weights `W + W_δ diag(Σ_i α_i z_i)`, folded once per prompt: a token then costs what it costs the dense model. They
    lie beside W and W_δ, which the next prompt needs, so that memory grows by the dense model's linear layers until
    another prompt begins, training does, or a weight changes.

    Attributes:
        prompt_ends: `[batch, length]` bool, the last prompt token of every example of the next call, rows of which may
            hold several, each beginning at position 0; used once.
        alpha: `[examples, experts]` of the last call; `None` while the frozen model runs.
        trains_masks: whether masks are still parameters.
        sparsity: τ, the share of mask elements that is to be zero.
        samples: draw gates while training instead of taking their medians.
        folds: fold weights; `False` saves their memory.
        multiplier: λ of the sparsity constraint, kept with the training's checkpoints.
    """

    multiplier: Tensor

    def __init__(
        self, hidden: int, experts: int, width: int, like: Tensor, *, trains_masks: bool, sparsity: float
    ) -> None:
        super().__init__()
        kind: Any = {"device": like.device, "dtype": like.dtype}
        self.first, self.second = nn.Linear(hidden, width, **kind), nn.Linear(width, experts, **kind)
        self.trains_masks, self.sparsity = trains_masks, sparsity
        if trains_masks:
            self.register_buffer("multiplier", torch.zeros(1, dtype=torch.float32, device=like.device))
        self.experts, self.samples, self.folds = experts, False, True
        self.prompt_ends: Tensor | None = None
        self.alpha: Tensor | None = None
        self.index: Tensor | None = None  # [batch, length], the example of every token, where a row holds several
        self._mixtures: dict[int, Tensor] = {}
        self._folded: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # with the versions of what they were made of
        self._is_frozen = self._is_held = False
        self._calls = 0  # that went on with one α

    def choose(self, hidden: Tensor) -> Tensor:
        """α `[examples, experts]` from the final hidden states `[examples, hidden]` of prompts' last tokens."""
        logits = self.second(F.silu(self.first(hidden.to(self.first.weight.dtype))))
        return logits.float().softmax(-1)

    def set_alpha(self, alpha: Tensor, index: Tensor | None = None) -> None:
        """Use these from now on."""
        if alpha is not self.alpha:
            self._forget()
        self.alpha, self.index, self._calls = alpha, index, 0

    def _go_on(self, alpha: Tensor) -> None:
        """Use the α of a cache, and count the calls that did so in a row while all examples had one, to within the
        rounding of equal rows of a batch."""
        calls = self._calls + 1 if alpha is self.alpha and bool((alpha - alpha[:1]).abs().max() < 1e-6) else 0
        self.set_alpha(alpha)
        self._calls = calls

    def train(self, mode: bool = True) -> Self:
        self._forget()
        return super().train(mode)

    def _forget(self) -> None:
        self._mixtures.clear()
        self._folded.clear()

    def folded_weight(self, site: "InterpolatedLinear") -> Tensor | None:
        """`W + W_δ diag(Σ_i α_i z_i)` `[out, in]` of a linear layer, where it pays to have it."""
        if not self.folds or self._calls < FOLDING or self._is_frozen or self.training or torch.is_grad_enabled():
            return None
        if not site.is_plain:
            return None
        assert self.alpha is not None
        versions = site.versions()
        if self._folded.get(id(site), (None,))[0] != versions:
            self._folded[id(site)] = versions, site.folded(self.alpha[0])
        return self._folded[id(site)][1]

    def mixture(self, site: "InterpolatedLinear", like: Tensor) -> Tensor | None:
        """`Σ_i α_i z_i` of a linear layer for its inputs `[batch, length, in]`, to be multiplied with them."""
        if self._is_frozen or self.alpha is None:
            return None
        if torch.is_grad_enabled() or self.training:
            mixed = mix(self.alpha, site.gates(sampled=self.samples and self.training))
        else:  # once per prompt
            if id(site) not in self._mixtures:
                self._mixtures[id(site)] = mix(self.alpha, site.gates())
            mixed = self._mixtures[id(site)]
        mixed = mixed.to(like.dtype)
        return mixed[:, None] if self.index is None else mixed[self.index.to(mixed.device)]

    def hold(self, alpha: Tensor) -> None:
        """Use this α `[1, experts]` for everything from now on."""
        self.set_alpha(alpha)
        self._is_held = True

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The model as it was before: no differences, for the time of the `with` block."""
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False

    def before(self, decoder: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Find α for what the decoder is about to see (a forward pre-hook)."""
        if self._is_frozen or self._is_held:
            return
        ends, self.prompt_ends = self.prompt_ends, None
        cache = options.get("past_key_values")
        if cache is not None and int(cache.get_seq_length()) > 0:
            if not hasattr(cache, "moetool_alpha"):
                raise RuntimeError("This cache was not begun by this model: its prompt's mixture is not known.")
            self._go_on(cache.moetool_alpha)
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
        alpha = self.choose(self._seen(decoder, given, ends))
        if cache is not None:
            cache.moetool_alpha = alpha
        self.set_alpha(alpha, index)

    def after(self, decoder: nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
        """Let a cache that the decoder itself has made remember α (a forward hook)."""
        cache = getattr(outputs, "past_key_values", None)
        if cache is not None and not self._is_frozen and self.alpha is not None:
            cache.moetool_alpha = self.alpha

    @torch.no_grad()
    def _seen(self, decoder: Any, given: dict[str, Any], ends: Tensor) -> Tensor:
        """Final hidden states `[examples, hidden]` of the frozen model where `ends` says."""
        length = int(ends.any(0).nonzero().max()) + 1  # nothing after the last prompt is needed
        shortened = {name: _shortened(value, length) for name, value in given.items()}
        training = [module for module in decoder.modules() if module.training]
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


def _ends(tokens: Tensor, given: Mapping[str, Any], *, whole: bool) -> Tensor:
    """`[batch, length]` bool: of every row the last token that is not padding if the `whole` is a prompt, or the
    first."""
    mask = given.get("attention_mask")
    is_known = isinstance(mask, Tensor) and mask.dim() == 2
    real = mask.bool() if is_known else torch.ones_like(tokens, dtype=torch.bool)  # type: ignore[union-attr]
    order = real.flip(1) if whole else real
    first = F.one_hot(order.int().argmax(1), tokens.shape[1]).bool()
    return first.flip(1) if whole else first


def interpolation_of(model: nn.Module) -> Interpolation | None:
    """The router of a model that has one."""
    return next((module for module in model.modules() if isinstance(module, Interpolation)), None)


def hold_mixtures(model: nn.Module) -> None:
    """Weigh all experts of a model equally, whatever the prompt."""
    if (interpolation := interpolation_of(model)) is not None:
        interpolation.hold(torch.full((1, interpolation.experts), 1 / interpolation.experts, device="cpu"))
