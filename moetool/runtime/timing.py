"""Seconds that a model takes for a prompt, and for every token after it."""

import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moetool.errors import InvalidInputError, ResourceError
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules.simoe_mixing import interpolation_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

ResultT = TypeVar("ResultT")

_FULL = "can't allocate memory"  # what torch says of memory that is not on a card


class Seconds(NamedTuple):
    """Seconds of one pass over a prompt that fills a cache, and of all new tokens after it, one at a time."""

    prefill: float
    decode: float


def time_decode(model: "PreTrainedModel", batch: int, length: int, new_tokens: int, seed: int = 0) -> Seconds:
    """Time `batch` prompts of `length` tokens, and `new_tokens` after each.

    Token ids are random, those that follow too, so that routing varies as much as it can and is the same for models
    that only differ in how they are stored. As in `generate`, a prompt's logits are those of its last token. Without
    new tokens nothing is cached, and a family that has logits of all tokens only (an encoder) computes them.

    Raises:
        InvalidInputError: the model keeps no cache, so that it has to be given the whole text for every token.
        ResourceError: memory does not suffice.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary(model), (batch, length + new_tokens), generator=generator).to(model.device)
    prompt, *following = ids.split([length, *[1] * new_tokens], dim=1)
    last: dict[str, Any] = {"logits_to_keep": 1} if keeps_last(model) else {}
    try:
        with torch.inference_mode():
            last |= begun_cache(model)
            output, prefill = _timed(lambda: model(input_ids=prompt, use_cache=bool(new_tokens), **last), model.device)
            if not new_tokens:
                return Seconds(prefill, 0.0)
            cache = cache_of(output)
            if cache is None:
                raise InvalidInputError(f"A {model.config.model_type} keeps no cache: what it generates is not timed.")
            del output
            return Seconds(prefill, _timed(lambda: _follow(model, following, cache), model.device)[1])
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _FULL not in str(error):
            raise
        raise ResourceError(
            f"{batch} prompts of {length} tokens do not fit in memory beside the model: take fewer or shorter ones."
        ) from error


def begun_cache(model: "PreTrainedModel") -> "dict[str, Cache]":
    """The empty cache that `generate` gives a model with SIMoE's masks, by its name; nothing for other models, which
    begin one by themselves. It tells a prompt, all of which says how experts are mixed, from a text to be scored."""
    from transformers import DynamicCache

    return {} if interpolation_of(model) is None else {CACHE: DynamicCache(config=model.config)}


def vocabulary(model: "PreTrainedModel") -> int:
    """Number of token ids that a model's embeddings have rows for."""
    return int(model.get_input_embeddings().weight.shape[0])


def keeps_last(model: "PreTrainedModel") -> bool:
    """Whether it can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _follow(model: "PreTrainedModel", tokens: list[Tensor], cache: "Cache") -> None:
    for token in tokens:
        cache = cache_of(model(input_ids=token, use_cache=True, **{CACHE: cache}))


def _timed(run: Callable[[], ResultT], device: torch.device) -> tuple[ResultT, float]:
    """What it gives, and seconds until the device has it."""
    _wait_for(device)
    start = time.perf_counter()
    result = run()
    _wait_for(device)
    return result, time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
