"""An OpenAI-compatible server: transformers' own for a checkpoint on moetool's kernels, llama.cpp's for a GGUF file."""

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.errors import UsageError
from moetool.job.progress import SILENT, Progress
from moetool.talk.gguf import ALL_LAYERS, CHAT_TEMPLATE, loading
from moetool.talk.options import ServeOptions
from moetool.talk.requests import EMPTY_PROMPT, NO_TEMPLATE, AskedOnce, check_fields, error_body, no_object

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MISSING_SERVER = (
    "Serving needs fastapi, uvicorn and openai, and not all of them are installed: pip install 'moetool[serve]'."
)


class Server:
    """A model behind an address, which is taken before the model is loaded.

    Attributes:
        address: `host:port`; the port is the one that was found, if any would do.
    """

    def __init__(self, model: str, file: Path | None, options: ServeOptions, progress: Progress = SILENT) -> None:
        """Load `model`; `file` is its GGUF file, if it is one.

        Raises:
            UsageError: a library is missing, the address cannot be listened at, or the model generates nothing.
            InvalidInputError, ResourceError: the model cannot be loaded.
        """
        uvicorn = _uvicorn()
        self._socket = _listen(options.host, options.port)
        try:
            host, port = self._socket.getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            app = _checkpoint_app(model, options, progress) if file is None else _gguf_app(model, file, options)
        except BaseException:
            self._socket.close()
            raise
        self._server: Any = uvicorn.Server(uvicorn.Config(app, log_level="warning"))

    def run(self, begun: Callable[[], None] = lambda: None) -> None:
        """Answer requests until the process is told to stop (SIGINT, SIGTERM), or `stop` is called elsewhere.

        Args:
            begun: called once requests are answered, and signals end `run` in order.
        """
        startup = self._server.startup

        async def announced(sockets: list[socket.socket]) -> None:
            await startup(sockets)
            begun()

        self._server.startup = announced
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run`, which blocks another thread, return."""
        self._server.should_exit = True


def _uvicorn() -> Any:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UsageError(_MISSING_SERVER)
    import uvicorn

    return uvicorn


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as closing:
            taken = closing.enter_context(socket.socket(family, kind, protocol))
            # Else a port stays taken for a minute after a server.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen()
            closing.pop_all()
            return taken
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"Cannot listen at {host}:{port}: {reason}. Give another --port (0 takes a free one) or another --host."
        ) from error


def _checkpoint_app(model: str, options: ServeOptions, progress: Progress) -> "FastAPI":
    from moetool.talk.app import build_app

    return build_app(model, options, progress)


def _gguf_app(model: str, file: Path, options: ServeOptions) -> "FastAPI":
    with loading(file):
        from llama_cpp.server import app as server
        from llama_cpp.server.settings import ModelSettings, ServerSettings

        settings = ModelSettings(
            model=str(file),
            model_alias=model,
            n_ctx=options.context or 0,
            n_gpu_layers=0 if options.device == "cpu" else ALL_LAYERS,
            verbose=False,
        )
        app: FastAPI = server.create_app(server_settings=ServerSettings(), model_settings=[settings])
    assert server._llama_proxy is not None  # create_app has loaded the file there, and tells nobody
    llama = server._llama_proxy()
    app.add_middleware(_Asked, may_be_empty=bool(llama.tokenize(b"")))
    if CHAT_TEMPLATE not in llama.metadata:
        from starlette.routing import Route

        # Else llama-cpp-python would write chats as for Llama 2. The first route that fits answers.
        app.router.routes.insert(0, Route("/v1/chat/completions", _without_template, methods=["POST"]))
    return app


class _Asked:
    """Refuses bodies that llama-cpp-python fails at: any that is no JSON object, empty prompts if texts begin with no
    token, and those that ask for several answers, of which it would give one."""

    def __init__(self, app: "ASGIApp", may_be_empty: bool) -> None:
        self._app, self._may_be_empty = app, may_be_empty

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        from starlette.requests import Request

        body = await Request(scope, receive).body()
        try:
            asked = json.loads(body)
        except ValueError as error:
            return await _refused(no_object(f"{error}"))(scope, receive, send)
        if not isinstance(asked, dict):
            return await _refused(no_object(f"it begins with {json.dumps(asked)[:20]}"))(scope, receive, send)
        try:
            check_fields(AskedOnce, asked)
        except UsageError as error:
            return await _refused(str(error))(scope, receive, send)
        if scope["path"] == "/v1/completions" and not self._may_be_empty and _is_empty(asked):
            return await _refused(EMPTY_PROMPT)(scope, receive, send)
        read: list[Message] = [{"type": "http.request", "body": body}]

        async def again() -> "Message":
            return read.pop() if read else await receive()

        await self._app(scope, again, send)


def _is_empty(asked: dict[str, object]) -> bool:
    """Whether a request has no prompt, or a list with none or an empty one."""
    return asked.get("prompt") in (None, "", [], [""])


def _without_template(_: object) -> "JSONResponse":
    """What programs are answered that want to chat with a model without a chat template."""
    return _refused(NO_TEMPLATE)


def _refused(message: str) -> "JSONResponse":
    from starlette.responses import JSONResponse

    return JSONResponse(error_body(message), status_code=400)
