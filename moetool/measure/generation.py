"""Text generation with a loaded model after a prompt, as `moetool generate` does it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from moetool.architectures.dense import is_encoder
from moetool.calibration.opening import Tokenizer
from moetool.calibration.windows import check_tokens, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import first_line
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.job.options import context_length
from moetool.job.progress import SILENT, Progress
from moetool.measure.loading import load_to_generate
from moetool.measure.options import GeneratingOptions
from moetool.measure.results import Generation, SynthesisResult

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


class GenerationOptions(GeneratingOptions):
    """Options of `moetool generate`: length, sampling, chat template and how the model is loaded."""

    max_new_tokens: int = Field(
        128, ge=1, description="At most; the model may end before [default: 128, as far as it goes]."
    )
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token every time; 1 draws as it predicts.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of what is drawn.")
    chat: Literal["auto", "never"] = Field(
        "auto", description="Give the prompt as a user's message where the tokenizer has a chat template."
    )


def generate(
    path: str,
    prompt: str,
    options: GenerationOptions,
    progress: Progress = SILENT,
    write: Callable[[str], None] | None = None,
) -> Generation:
    """Let a checkpoint go on after `prompt`; `write` gets the text as it comes, in pieces.

    Raises:
        UsageError: the model is an encoder, or prompt and answer are longer than its positions.
        InvalidInputError: model, tokenizer or prompt cannot be used.
        ResourceError: there is too little memory for the model.
        VerificationError: it gives NaN or infinity.
    """
    check_unicode("The prompt", prompt)
    checkpoint = open_to_generate(path)
    tokenizer = load_tokenizer(checkpoint.path)
    ids = _encode(tokenizer, prompt, options.chat)
    check_tokens(ids, checkpoint.settings)
    options = _fit(options, ids.shape[1], context_length(checkpoint.settings), path)
    model, synthesis = load_to_generate(checkpoint, options, progress)
    start = time.perf_counter()
    output = _go_on(model, tokenizer, ids, options, write)
    seconds = time.perf_counter() - start
    new = output[0, ids.shape[1] :]
    return Generation(
        model=path,
        prompt=prompt,
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        seconds=round(seconds, 3),
        tokens_per_second=round(len(new) / seconds, 3),
        synthesized=synthesis.chosen,
        synthesis=SynthesisResult.of(synthesis),
    )


def check_unicode(what: str, text: str) -> None:
    """Raise `InvalidInputError` for a text with half of a surrogate pair, which no tokenizer takes: Python keeps a byte
    that is not UTF-8 as one, and an escape in JSON may be one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what} is not UTF-8 ({error}). Convert it, for example with iconv.") from error


def open_to_generate(path: str) -> Checkpoint:
    """A checkpoint that predicts the next token. Raises `UsageError` for an encoder, else as `Checkpoint.open`."""
    checkpoint = Checkpoint.open(path)
    if is_encoder(checkpoint.config):
        raise UsageError(f"{path} is an encoder ({checkpoint.config.get('model_type')}): it generates nothing.")
    return checkpoint


def _fit(options: GenerationOptions, prompt: int, context: int | None, path: str) -> GenerationOptions:
    """No more new tokens than there are positions after the prompt, unless they were asked for.

    Raises:
        UsageError: they were, or the prompt alone has too many.
    """
    left = math.inf if context is None else context - prompt
    if options.max_new_tokens <= left:
        return options
    if "max_new_tokens" in options.model_fields_set or left < 1:
        raise UsageError(
            f"A prompt of {prompt} tokens and {options.max_new_tokens} new ones are more than the {context} positions "
            f"of {path}. Make the prompt shorter, or --max-new-tokens smaller."
        )
    return options.model_copy(update={"max_new_tokens": left})


def _encode(tokenizer: Tokenizer, prompt: str, chat: str) -> torch.Tensor:
    """Token ids `[1, length]`, at least one.

    Raises:
        UsageError: there is nothing to begin with.
        InvalidInputError: the chat template fails.
    """
    if chat == "auto" and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        ids = chat_tokens(tokenizer, messages, "prompt", " --chat never gives it as it is.")
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].long()
    if ids.shape[1] == 0:
        raise UsageError("The prompt is empty, and the tokenizer begins texts with nothing: write something.")
    return ids


def chat_tokens(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], what: str, advice: str = ""
) -> torch.Tensor:
    """Token ids `[1, length]` of messages in the tokenizer's chat template, up to where the answer begins.

    Raises:
        InvalidInputError: the chat template fails; the error names `what` it was to write, and ends with the advice.
    """
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    except Exception as error:  # a template may raise whatever it likes
        raise InvalidInputError(f"The chat template cannot write the {what}: {first_line(error)}.{advice}") from error
    ids: torch.Tensor = encoded.long()
    return ids


@torch.inference_mode()
def _go_on(
    model: "PreTrainedModel",
    tokenizer: Tokenizer,
    ids: torch.Tensor,
    options: GenerationOptions,
    write: Callable[[str], None] | None,
) -> torch.Tensor:
    """The prompt's ids and the new ones `[1, all]`."""
    from transformers import TextStreamer

    torch.manual_seed(options.seed)
    config = generation_config(model, tokenizer, options.max_new_tokens, options.temperature)
    streamer = None
    if write is not None:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: write(text)
    ids = ids.to(model.device)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        streamer=streamer,
        logits_processor=[only_numbers],
    ).cpu()


def generation_config(
    model: "PreTrainedModel", tokenizer: Tokenizer, new_tokens: int, temperature: float
) -> "GenerationConfig":
    """A model's own end and padding, and of what else its `generation_config.json` says nothing."""
    from transformers import GenerationConfig

    drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    given = model.generation_config
    return GenerationConfig(
        max_new_tokens=new_tokens,
        eos_token_id=given.eos_token_id,
        pad_token_id=given.pad_token_id if given.pad_token_id is not None else tokenizer.eos_token_id,
        bos_token_id=given.bos_token_id,
        **drawn,
    )


def only_numbers(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits as they are. Raises `VerificationError` if no token can be told from them."""
    if bool((logits.isnan() | logits.isposinf()).any()):
        raise VerificationError(
            "The model gives NaN or infinity: its weights are damaged, and `moetool verify` names them, or the compute "
            "dtype is too narrow (--compute-dtype float32)."
        )
    return logits
