"""Programs that hang up before they are answered: generation for them ends at the next token."""

import asyncio
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from transformers import StoppingCriteria

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_GONE: ContextVar[threading.Event] = ContextVar("gone")


def gone() -> threading.Event:
    """The event that is set when the program hangs up whose request is being handled, for use in other threads."""
    return _GONE.get(threading.Event())


class HangUps:
    """Middleware that hears of hang-ups while a request is handled. The handlers listen only while they stream."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        heard: asyncio.Queue[Message] = asyncio.Queue()
        event = threading.Event()
        _GONE.set(event)

        async def listen() -> None:
            while not event.is_set():
                message = await receive()
                if message["type"] == "http.disconnect":
                    event.set()
                heard.put_nowait(message)

        async def hear() -> "Message":
            message = await heard.get()
            if message["type"] == "http.disconnect":
                heard.put_nowait(message)  # for whoever asks again
            return message

        listening = asyncio.create_task(listen())
        try:
            await self._app(scope, hear, send)
        finally:
            listening.cancel()


class HungUp(StoppingCriteria):
    """Ends the generation of one answer once its event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return a boolean `[1]` for `input_ids` `[1, length]`."""
        return torch.tensor([self._event.is_set()], device=input_ids.device)
