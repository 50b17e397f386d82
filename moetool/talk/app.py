"""transformers' serving app around a model that moetool has loaded.

Its parts are those of `transformers serve` (`transformers.cli.serving`, 5.17 to 5.24). Routes that load, unload or hear
are left out.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from moetool.calibration.windows import load_tokenizer
from moetool.errors import MoetoolError, UsageError
from moetool.job.options import context_length
from moetool.job.progress import Progress
from moetool.measure.generation import only_numbers, open_to_generate
from moetool.measure.loading import load_to_generate
from moetool.talk.hanging_up import HangUps, HungUp, gone
from moetool.talk.options import ServeOptions
from moetool.talk.requests import (
    EMPTY_PROMPT,
    NO_TEMPLATE,
    AskedChat,
    AskedCompletion,
    AskedFor,
    AskedResponse,
    check_request,
    error_body,
    is_drawn,
    no_object,
    stop_words,
)
from moetool.talk.stopping import StopWords, cut, cut_events

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HANDLERS: dict[str, tuple[Any, type[AskedFor]]] = {
    "chat_handler": (ChatCompletionHandler, AskedChat),
    "completion_handler": (CompletionHandler, AskedCompletion),
    "response_handler": (ResponseHandler, AskedResponse),
}
_APPLIED_HERE = {"stop": None, "logit_bias": None, "seed": None}  # fields that transformers applies otherwise
_LEFT_OUT = {"/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions"}


class LoadedModel(ModelManager):
    """A model manager of transformers' serving app that holds one loaded model and never unloads it."""

    def __init__(self, name: str, model: "PreTrainedModel", tokenizer: Any) -> None:
        super().__init__()
        self.force_model, self._pair = name, (model, tokenizer)  # loaded here, so not told to transformers' own

    def load_model_and_processor(self, *_: object, **__: object) -> tuple["PreTrainedModel", Any]:
        """Return the loaded model and its tokenizer, whatever model was asked for."""
        return self._pair

    def list_models(self, *_: object) -> list[dict[str, object]]:
        """The one that is served, in place of all that the hub's cache holds."""
        is_there = {"status": {"value": "loaded"}}
        return [{"id": self.force_model, "object": "model", "owned_by": "moetool", "created": 0, **is_there}]

    get_gen_models = list_models  # its name before transformers 5.24


def build_app(name: str, options: ServeOptions, progress: Progress) -> FastAPI:
    """Load the checkpoint `name`, and answer requests for it.

    Raises:
        UsageError: it is an encoder.
        ResourceError, InvalidInputError: as `load_to_generate`.
    """
    checkpoint = open_to_generate(name)
    tokenizer: Any = load_tokenizer(checkpoint.path)
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = f"{{{{ raise_exception('{NO_TEMPLATE}') }}}}"
    model = load_to_generate(checkpoint, options, progress)[0]
    _prepare_generation(model, context_length(checkpoint.settings))
    manager, state = LoadedModel(name, model, tokenizer), GenerationState()
    served = {
        kind: _checking(handler(model_manager=manager, generation_state=state), asked)
        for kind, (handler, asked) in _HANDLERS.items()
    }
    left_out = {kind: None for kind in inspect.signature(build_server).parameters if kind.endswith("_handler")}
    app = build_server(manager, generation_state=state, **{**left_out, **served})
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) not in _LEFT_OUT]
    for kind in (MoetoolError, TemplateError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(HangUps)
    return app


def _checking(handler: Any, asked: type[AskedFor]) -> Any:
    """Let a handler refuse requests whose fields it would fail at, and answer the others as OpenAI's API does."""
    handle, build = handler.handle_request, handler._build_generation_config

    @functools.wraps(handle)
    async def checked(body: dict[str, Any], request_id: str) -> Any:
        check_request(asked, body)
        answer = await handle({"stream": False, **body}, request_id)  # transformers streams responses unless told
        words = stop_words(body)
        if asked is not AskedResponse and isinstance(answer, StreamingResponse):
            answer.body_iterator = _ended(answer.body_iterator, words)
        elif asked is not AskedResponse and words:
            return JSONResponse(cut(json.loads(answer.body), words))
        return answer

    @functools.wraps(build)
    def built(body: dict[str, Any], *given: Any, **named: Any) -> Any:
        config = build({**body, **_APPLIED_HERE}, *given, **named)
        if words := stop_words(body):
            config.stop_strings = words
        if bias := body.get("logit_bias"):
            config.sequence_bias = {(int(token),): float(added) for token, added in bias.items()}
        config.moetool_seed, config.moetool_gone = body.get("seed"), gone()
        config.do_sample = is_drawn(body) or config.do_sample  # else transformers passes over the temperature
        return config

    handler.handle_request, handler._build_generation_config = checked, built
    return handler


async def _ended(events: Any, signs: Sequence[str]) -> AsyncGenerator[Any, None]:
    """A stream's events without stop words, and the one by which programs know its end."""
    async with contextlib.aclosing(events):
        async for event in cut_events(events, signs):
            yield event
    yield "data: [DONE]\n\n"


def _prepare_generation(model: Any, context: int | None) -> None:
    """Let `generate` refuse prompts that there are no positions for, end at stop words, where positions do and when the
    program hangs up, and seed what it draws when it begins: other requests may be answered between a request's arrival
    and its turn."""
    generate = model.generate
    tokens = model.get_input_embeddings().num_embeddings

    @functools.wraps(generate)
    def checked(*, input_ids: torch.Tensor, generation_config: Any, tokenizer: Any, **given: Any) -> Any:
        prompt, is_gone = input_ids.shape[1], generation_config.moetool_gone
        del generation_config.moetool_gone  # which cannot be copied
        if is_gone.is_set():
            raise UsageError("Nobody waits for this answer any more.")
        if prompt == 0:
            raise UsageError(EMPTY_PROMPT)
        if context is not None:
            if prompt >= context:
                raise UsageError(f"The prompt has {prompt} tokens, and the model {context} positions.")
            wanted = generation_config.max_new_tokens or context
            generation_config.max_new_tokens = min(wanted, context - prompt)
        for (token,) in generation_config.sequence_bias or ():
            if not 0 <= token < tokens:
                raise UsageError(f"logit_bias: the model has tokens 0 to {tokens - 1}, and none with number {token}.")
        signs, generation_config.stop_strings = generation_config.stop_strings or (), None
        if generation_config.moetool_seed is not None:
            torch.manual_seed(generation_config.moetool_seed)
        return generate(
            input_ids=input_ids,
            generation_config=generation_config,
            logits_processor=[only_numbers],
            stopping_criteria=[HungUp(is_gone), *([StopWords(tokenizer, signs, prompt)] if signs else [])],
            **given,
        )

    model.generate = checked


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """What was wrong with a request, as OpenAI's API says it."""
    status, told = 400, str(error)
    if isinstance(error, HTTPException):
        status, told = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        told = no_object(error.errors()[0]["msg"])
        if "json" not in (sent := request.headers.get("content-type", "no type")):
            told = f"The body is sent as {sent}. Send it as JSON: curl -H 'Content-Type: application/json' …"
    return JSONResponse(error_body(told), status_code=status)
