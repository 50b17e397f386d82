"""Answers of a checkpoint, by transformers on moetool's kernels."""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from moetool.calibration.windows import check_tokens, load_tokenizer
from moetool.checkpoint.source import first_line
from moetool.errors import InvalidInputError, UsageError
from moetool.job.options import context_length
from moetool.job.progress import SILENT, Progress
from moetool.measure.generation import generation_config, load_to_generate, only_numbers, open_to_generate
from moetool.talk.conversation import STOP, Turn, Until, Write, plain_prompt
from moetool.talk.options import ChatOptions

if TYPE_CHECKING:
    from transformers import Cache


class CheckpointTalker:
    """A loaded model, and keys and values of the conversation so far."""

    def __init__(self, path: str, options: ChatOptions, progress: Progress = SILENT) -> None:
        """Load the model. Raises as `load_to_generate`."""
        checkpoint = open_to_generate(path)
        self._path, self._options, self._settings = path, options, checkpoint.settings
        self._tokenizer: Any = load_tokenizer(checkpoint.path)
        self.has_template = bool(getattr(self._tokenizer, "chat_template", None))
        self._model: Any = load_to_generate(checkpoint, options, progress)[0]
        self._held: tuple[list[int], Cache] | None = None
        torch.manual_seed(options.seed)

    @torch.inference_mode()
    def answer(self, messages: Sequence[Turn], write: Write) -> tuple[str, int]:
        """Generate; the tokens of earlier turns are not run again, where the template leaves them as they were."""
        from transformers import TextStreamer

        ids = self._encode(messages)
        new_tokens = self._room_after(len(ids))
        until = Until(write, None if self.has_template else STOP)
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: until(text)
        cache = self._cache_for(ids)
        config = generation_config(self._model, self._tokenizer, new_tokens, self._options.temperature)
        config.return_dict_in_generate, config.stop_strings = True, None if self.has_template else [STOP]
        tokens = torch.tensor([ids], device=self._model.device)
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=config,
            past_key_values=cache,
            tokenizer=self._tokenizer,
            streamer=streamer,
            logits_processor=[only_numbers],
        )
        until.finish()
        said = output.sequences[0].tolist()
        if output.past_key_values is not None:
            self._held = said[:-1], output.past_key_values  # the last token was drawn, and not run
        return until.text, len(said) - len(ids)

    def _cache_for(self, ids: list[int]) -> "Cache | None":
        """Keys and values of the tokens that earlier turns share with `ids`, at most all but the last of these."""
        from transformers.cache_utils import DynamicLayer

        held, self._held = self._held, None  # an answer that is broken off leaves it half written
        if held is None:
            return None
        tokens, cache = held
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, ids[:-1], strict=False)))
        if same < len(tokens):  # a template writes answers anew, and tokenizers cut text otherwise than models
            if any(type(layer) is not DynamicLayer for layer in cache.layers):
                return None  # windows and recurrent states cannot go back
            cache.crop(same - len(tokens))
        return cache

    def _encode(self, messages: Sequence[Turn]) -> list[int]:
        if self.has_template:
            try:
                encoded = self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_dict=True
                )["input_ids"]
            except Exception as error:  # a template may raise whatever it likes
                raise InvalidInputError(
                    f"The chat template cannot write the conversation: {first_line(error)}."
                ) from error
        else:
            encoded = self._tokenizer(plain_prompt(messages))["input_ids"]
        ids = [int(token) for token in encoded]
        check_tokens(torch.tensor([ids]), self._settings)
        return ids

    def _room_after(self, prompt: int) -> int:
        """New tokens that there are positions for, `max_tokens` at most."""
        context = context_length(self._settings)
        if context is not None and prompt >= context:
            raise UsageError(
                f"The conversation has {prompt} tokens, and {self._path} {context} positions: begin a new one (/reset)."
            )
        return self._options.max_tokens if context is None else min(self._options.max_tokens, context - prompt)
