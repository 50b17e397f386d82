"""Text that a model writes itself, to calibrate it on: like what it was trained on, as far as it has learned that.

Windows begin with a few words of each kind of the bundled text that the tokenizer can read, or with none, and go on as
the model predicts, at several temperatures, which take turns. Tokens are drawn by the Gumbel-max trick: the greatest
sum of `log p / T` and noise. Each window has its own noise, so that windows of all temperatures are in one batch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.calibration.bundled import kinds
from moetool.calibration.mixing import shared_out, taking_turns
from moetool.calibration.opening import Tokenizer
from moetool.calibration.readable import BundledWindows
from moetool.errors import InvalidInputError, VerificationError
from moetool.numerics.seeding import generator
from moetool.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = 8
CACHED_TOKENS = 1 << 14  # that a key-value cache holds at once


def windows_at_once(length: int) -> int:
    """Number of windows of `length` tokens that the model writes together: as many as a cache of 2^14 tokens holds."""
    return max(1, CACHED_TOKENS // length)


def sampled_windows(
    model: "PreTrainedModel",
    tokenizer: Tokenizer,
    *,
    windows: int,
    length: int,
    temperatures: Sequence[float],
    opening: Sequence[int],
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """Sample windows of a model's own text: int64 `[windows, length]` on the CPU, equal for equal seeds.

    Args:
        model: of transformers, with a key-value cache. What its generation config says is forgotten.
        tokenizer: the model's.
        windows: how many.
        length: tokens in each, without the `opening`.
        temperatures: of windows, which take turns.
        opening: what the model sees before each window; where that is nothing, it sees BOS or EOS, if there is one.
        seed: of prompts and draws.
        tick: called once per batch.

    Raises:
        InvalidInputError: there is nothing to begin with: no BOS, no EOS, and no bundled text that the tokenizer reads.
        VerificationError: the model gives NaN or infinity.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0)  # else its penalties hold, too
    known = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    start = [*opening] or known[:1]
    by_kind = _prompts(tokenizer, windows, min(PROMPT_TOKENS, length // 2), seed, can_be_empty=bool(start))
    given = [(ids, temperatures[place % len(temperatures)]) for own in by_kind for place, ids in enumerate(own)]
    prompts = [given[position] for position in taking_turns([*map(len, by_kind)])]
    found = torch.empty(windows, length, dtype=torch.int64)
    for rows in _batches([len(ids) for ids, _ in prompts], windows_at_once(length)):
        ids = torch.tensor([[*start, *prompts[row][0]] for row in rows], device=model.device)
        streams = [generator(seed, "own text", row) for row in rows]
        drawn = _Draw([prompts[row][1] for row in rows], streams, tokenizer)
        with torch.inference_mode(), quiet():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(start) + length - ids.shape[1],
                do_sample=False,
                logits_processor=[drawn],
            )
        found[rows] = made[:, len(start) :].cpu()
        tick()
    return found


def _prompts(
    tokenizer: Tokenizer, windows: int, tokens: int, seed: int, *, can_be_empty: bool
) -> list[list[list[int]]]:
    """Token ids of the words that windows begin with, by kind of the bundled text; if they `can_be_empty`, none are as
    one kind more, and in place of what is not there."""
    names = kinds()
    due = dict(zip(names, shared_out(windows, [1.0] * (len(names) + can_be_empty)), strict=False))
    drawn = BundledWindows(due, tokenizer, length=tokens, seed=seed).drawn if tokens else {}
    found = [[ids.tolist() for ids in own] for own in drawn.values() if own]
    empty = windows - sum(map(len, found))
    if empty and not can_be_empty:
        raise InvalidInputError("The tokenizer has no BOS, no EOS and no use for the bundled text: no text can begin.")
    return [*found, [[]] * empty] if empty else found


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of prompts of equal length, at `most` so many together."""
    same = [[row for row, own in enumerate(lengths) if own == length] for length in dict.fromkeys(lengths)]
    return [rows[i : i + most] for rows in same for i in range(0, len(rows), most)]


class _Draw:
    """A logits processor for `generate`: its scores are greatest at a token that is drawn from what the model predicts.
    Special tokens, and those that the tokenizer does not have, are never drawn."""

    def __init__(self, temperatures: Sequence[float], streams: Sequence[torch.Generator], tokenizer: Tokenizer) -> None:
        self._temperatures, self._streams = torch.tensor(temperatures)[:, None], streams
        self._special, self._size = list(tokenizer.all_special_ids), len(tokenizer)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` → scores of the same shape."""
        scores = logits.cpu().float()
        if bool((scores.isnan() | scores.isposinf()).any()):
            raise VerificationError(
                "The model gives NaN or infinity: its weights are damaged, and `moetool verify` names them, or the "
                "compute dtype is too narrow (--compute-dtype float32)."
            )
        waits = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=stream) for stream in self._streams])
        scores = scores / self._temperatures - waits.log()  # the negative log of an exponential is Gumbel noise
        scores[:, self._special] = scores[:, self._size :] = -torch.inf
        return scores.to(logits.device)
