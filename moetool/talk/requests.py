"""Fields of requests to `moetool serve`, in OpenAI's words: types and ranges of those that are read."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Json, Strict, ValidationError, field_validator

from moetool.errors import UsageError
from moetool.measure.generation import check_unicode

NO_TEMPLATE = "This model has no chat template: send text to /v1/completions"
EMPTY_PROMPT = "The prompt is empty, and the tokenizer begins texts with nothing."
_TEXTS = ("text", "input_text", "output_text")  # types of a message's parts, in chats and in responses
_UNANSWERED = ("logprobs", "echo")  # whose answer transformers' server would leave out without a word


def _check_parts(content: object) -> None:
    """Raise `ValueError` for pictures and sounds, which transformers' server would leave out without a word."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and (kind := part.get("type")) not in _TEXTS:
            raise ValueError(f"a part of type {kind!r} cannot be read, only text")


class ChatMessage(BaseModel):
    """A turn of a chat, as far as every template reads it."""

    role: str
    content: str | list[dict[str, object]] | None = None

    @field_validator("content")
    @classmethod
    def _is_text(cls, content: str | list[dict[str, object]] | None) -> str | list[dict[str, object]] | None:
        _check_parts(content)
        return content


def no_object(why: str) -> str:
    """Return the error message for a request whose body is no JSON object, and why it is none."""
    return f"The body is not a JSON object: {why}."


def error_body(message: str) -> dict[str, object]:
    """Return what OpenAI's API answers to a request that it refuses, as JSON has it."""
    return {"error": {"message": message, "type": "invalid_request_error"}}


class AnswerFormat(BaseModel):
    """Form of the answer: a grammar, such as one of JSON, is not enforced."""

    type: Literal["text"]


class AskedOnce(BaseModel):
    """Fields that ask for several answers to one request, of which no server here gives more than one."""

    model_config = ConfigDict(strict=True)  # a number in quotes would go on to the server as it is

    n: Literal[1] | None = None
    best_of: Literal[1] | None = None


class AskedFor(AskedOnce):
    """What requests of all routes can ask of generation; other fields are left to transformers."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, gt=-1, allow_inf_nan=False)  # 1 more divides repeated tokens' logits
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stop: str | list[str] | None = None
    presence_penalty: Literal[0] | None = None
    response_format: AnswerFormat | None = None
    suffix: Literal[""] | None = None  # transformers' server would only write it behind the answer
    logit_bias: dict[Annotated[int, Strict(False)], FiniteFloat] | None = None  # keys in JSON are strings
    generation_config: Json[dict[str, object]] | None = None


def stop_words(body: Mapping[str, object]) -> list[str]:
    """Texts at which the answer of a checked body ends; an empty one ends nothing."""
    stop = body.get("stop") or []
    return [word for word in ([stop] if isinstance(stop, str) else stop) if word]  # type: ignore[attr-defined]


def is_drawn(body: Mapping[str, object]) -> bool:
    """Whether a checked body asks for tokens drawn at random: a temperature above 0, or else a `top_p` below 1."""
    temperature, top_p = body.get("temperature"), body.get("top_p")
    return bool(temperature) if temperature is not None else top_p is not None and top_p != 1


class AskedCompletion(AskedFor):
    """Fields of a request to `/v1/completions`, which continues a prompt."""

    prompt: str


class AskedChat(AskedFor):
    """Fields of a request to `/v1/chat/completions`, which answers the turns of a chat."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class AskedResponse(AskedFor):
    """Fields of a request to `/v1/responses`, which answers a text or the turns of a chat."""

    input: str | list[dict[str, object]]
    max_output_tokens: int | None = Field(None, ge=1)

    @field_validator("input")
    @classmethod
    def _is_text(cls, turns: str | list[dict[str, object]]) -> str | list[dict[str, object]]:
        for turn in turns if isinstance(turns, list) else ():
            _check_parts(turn.get("content"))
        return turns


def check_request(kind: type[AskedFor], body: Mapping[str, object]) -> None:
    """Check a body for transformers' server.

    Raises:
        UsageError: it lacks a field, has one of another type or out of range, or asks for what is not returned.
        InvalidInputError: its text is not Unicode.
    """
    check_unicode("The request", json.dumps(body, ensure_ascii=False))
    for field in _UNANSWERED:
        if body.get(field) is not None and body[field] is not False:
            raise UsageError(f"{field}: this server does not return it. Leave the field out.")
    check_fields(kind, body)


def check_fields(kind: type[AskedOnce], body: Mapping[str, object]) -> None:
    """Check the fields of a body that `kind` has. Raises `UsageError` for the first of another type or out of range."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UsageError(f"{field}: {first['msg'].removeprefix('Value error, ')}.") from error
