"""`moetool serve`: what programs are answered over HTTP."""

import asyncio
import json
import re
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES

from moetool.calibration.windows import load_tokenizer
from moetool.measure.generation import GenerationOptions, generate, only_numbers
from moetool.talk.options import ServeOptions, gguf_file
from moetool.talk.server import Server, _Asked

for library in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(library, reason="wants moetool[serve]")

Ask = Callable[..., tuple[int, Any]]
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PROMPT = "one two"
HELLO = [{"role": "user", "content": "hi"}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]


@contextmanager
def serving(model: Path) -> Iterator[Ask]:
    """`ask(route, **body)`: status and content of the answer of a server for the model; `raw` is a body as it is."""
    with served(model) as address:
        yield asking_at(address)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server for the model."""
    server = Server(str(model), gguf_file(str(model)), ServeOptions(port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join()


def asking_at(address: str) -> Ask:
    def ask(route: str, *, raw: str | None = None, sent: str = "application/json", **body: object) -> tuple[int, Any]:
        text = raw or (json.dumps(body) if body else None)
        data = None if text is None else text.encode()
        request = urllib.request.Request(f"http://{address}{route}", data, {"Content-Type": sent})
        try:
            with NO_PROXY.open(request) as answer:
                status, told = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, told = error.code, error.read().decode()
        return status, told if told.startswith("data:") else json.loads(told)

    return ask


@pytest.fixture(scope="module")
def ask(tiny_mixtral: Path) -> Iterator[Ask]:
    with serving(tiny_mixtral) as asking:
        yield asking


def test_it_goes_on_as_generate_does(ask: Ask, tiny_mixtral: Path) -> None:
    status, answer = ask("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0)
    assert status == 200
    own = generate(str(tiny_mixtral), PROMPT, GenerationOptions(max_new_tokens=5))
    assert answer["choices"][0]["text"] == own.text
    assert answer["usage"]["completion_tokens"] == own.new_tokens


def test_a_streamed_answer_is_the_whole_one(ask: Ask) -> None:
    _, whole = ask("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0)
    _, events = ask("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, stream=True)
    pieces = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert events.endswith("data: [DONE]\n\n")


def text_of(told: Any) -> tuple[str, str]:
    """Text and reason of the end of a completion, streamed or not."""
    if isinstance(told, dict):
        return told["choices"][0]["text"], told["choices"][0]["finish_reason"]
    lines = [line for line in told.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_its_first_stop_word(ask: Ask, stream: bool) -> None:
    def answer(stop: object = None) -> tuple[str, str]:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": stream}
        status, told = ask("/v1/completions", **body, stop=stop)
        assert status == 200
        return text_of(told)

    whole, reason = answer()
    assert reason == "length"
    for nothing in ([], "", [""], "\N{SNOWMAN}\N{SNOWMAN}"):
        assert answer(nothing) == (whole, "length")
    middle = whole[len(whole) // 2 :][:3]
    for stop in (middle, [middle], ["not in it", middle, whole[-2:]], whole[-2:], whole[0]):
        signs = [stop] if isinstance(stop, str) else stop
        end = min(at for sign in signs if (at := whole.find(sign)) >= 0)
        assert answer(stop) == (whole[:end], "stop")


def test_an_error_in_a_stream_is_told_as_openais_api_does(ask: Ask) -> None:
    status, events = ask("/v1/completions", prompt="one two three " * 2000, stream=True)
    error = json.loads(events.split("\n\n")[0].removeprefix("data: "))["error"]
    assert (status, error["type"]) == (200, "invalid_request_error")
    assert re.match(r"The prompt has \d+ tokens, and the model \d+ positions", error["message"])


def test_a_bias_of_a_token_counts(ask: Ask, tiny_mixtral: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    token = 7
    answer = ask("/v1/completions", **body, logit_bias={str(token): 1000})[1]
    assert answer["choices"][0]["text"] == load_tokenizer(tiny_mixtral).decode([token] * 3)
    assert ask("/v1/completions", **body, logit_bias={})[1]["choices"] == ask("/v1/completions", **body)[1]["choices"]


def test_transformers_own_settings_of_generation(ask: Ask) -> None:
    body = {"prompt": PROMPT, "generation_config": json.dumps({"do_sample": False})}
    short, long = (ask("/v1/completions", **body, **limit)[1]["usage"] for limit in ({"max_tokens": 3}, {}))
    assert short["completion_tokens"] == 3 < long["completion_tokens"]


def test_a_seed_counts_whatever_else_is_answered_meanwhile(ask: Ask) -> None:
    def text(seed: int) -> str:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 2.0, "seed": seed}
        return text_of(ask("/v1/completions", **body)[1])[0]

    alone = [text(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, range(6))) == alone


@pytest.mark.parametrize("drawing", [{"temperature": 5.0}, {"top_p": 0.9}])
def test_tokens_are_drawn_where_the_request_says_so(ask: Ask, drawing: dict[str, float]) -> None:
    """Whether or not the model's generation_config.json has `do_sample`."""

    def text(seed: int, **other: object) -> str:
        return ask("/v1/completions", prompt=PROMPT, max_tokens=8, seed=seed, **{**drawing, **other})[1]["choices"][0][
            "text"
        ]

    assert len({text(seed) for seed in range(4)}) > 1
    assert text(0) == text(0)
    assert text(0, temperature=0) == text(1, temperature=0)


def test_models_are_the_one_that_is_served(ask: Ask, tiny_mixtral: Path) -> None:
    [told] = ask("/v1/models")[1]["data"]
    assert (told["id"], told["owned_by"], told["status"]) == (str(tiny_mixtral), "moetool", {"value": "loaded"})
    assert ask("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/v1/completions", {"prompt": "one two three " * 2000}, r"The prompt has \d+ tokens, and the model \d+ pos"),
        ("/v1/completions", {"prompt": ""}, "The prompt is empty"),
        ("/v1/chat/completions", {"messages": HELLO}, "has no chat template"),
        ("/v1/chat/completions", {"messages": []}, "messages: .*at least 1"),
        ("/v1/chat/completions", {"model": None}, "messages: Field required"),
        ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, r"messages\.0\.role: Field required"),
        ("/v1/responses", {"max_output_tokens": 2}, "input: Field required"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt: .*string"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}, "max_tokens: .*greater than or equal to 1"),
        ("/v1/completions", {"prompt": PROMPT, "temperature": -1}, "temperature: .*greater than or equal to 0"),
        ("/v1/completions", {"prompt": PROMPT, "seed": "a"}, "seed: .*integer"),
        ("/v1/completions", {"prompt": PROMPT, "n": 3}, "n: "),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 0}, "logprobs: this server does not return it"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}, "echo: this server does not return it"),
        ("/v1/completions", {"prompt": PROMPT, "presence_penalty": 0.5}, "presence_penalty: .*0"),
        ("/v1/chat/completions", {"messages": PICTURE}, "messages.0.content: a part of type 'image_url' cannot"),
        ("/v1/responses", {"input": PICTURE}, "input: a part of type 'image_url' cannot be read, only text"),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            "response_format.type: .*text",
        ),
        ("/v1/completions", {"prompt": PROMPT, "suffix": "end"}, "suffix: "),
        ("/v1/completions", {"prompt": PROMPT, "temperature": "0.0"}, "temperature: .*number"),
        ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"x": 1}}, "logit_bias.*integer"),
        ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"99999": 1}}, "tokens 0 to [0-9]+, and none with number"),
        ("/v1/completions", {"prompt": PROMPT, "generation_config": "{"}, "generation_config: "),
        ("/v1/completions", {"prompt": PROMPT, "generation_config": "[3]"}, "generation_config: .*(dict|object)"),
        ("/v1/completions", {"prompt": "half of a pair: \ud83d"}, "not UTF-8"),
    ],
)
def test_what_cannot_be_answered(ask: Ask, route: str, body: dict[str, object], said: str) -> None:
    status, answer = ask(route, **body)
    assert status == 400
    assert re.search(said, answer["error"]["message"])


def test_another_model_is_refused_in_the_same_words(ask: Ask) -> None:
    status, answer = ask("/v1/completions", prompt=PROMPT, model="other")
    assert status == 400
    assert "other" in answer["error"]["message"]


def test_a_body_that_is_no_object(ask: Ask) -> None:
    status, answer = ask("/v1/completions", raw="[1, 2]")
    assert status == 400
    assert answer["error"]["message"].startswith("The body is not a JSON object")


def test_a_body_that_is_sent_as_something_else(ask: Ask) -> None:
    """As curl does unless it is told."""
    status, answer = ask("/v1/completions", prompt=PROMPT, sent="application/x-www-form-urlencoded")
    assert status == 400
    assert "Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize("route", ["/reset", "/load_model", "/v1/audio/transcriptions"])
def test_the_model_stays(ask: Ask, route: str) -> None:
    status, answer = ask(route, model="other")
    assert (status, answer["error"]["message"]) == (404, "Not Found")
    assert ask("/v1/completions", prompt=PROMPT, max_tokens=1)[0] == 200


def test_a_chat_by_the_models_template(tiny_mixtral: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_mixtral, tmp_path / "model")
    (model / "chat_template.jinja").write_text(FAMILIES["mistral"].template)
    with serving(model) as asking:
        status, answer = asking(
            "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], max_tokens=5, temperature=0
        )
        own = generate(str(model), PROMPT, GenerationOptions(max_new_tokens=5))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, own.text)
        stop, body = own.text[len(own.text) // 2 :][:2], {"max_tokens": 5, "temperature": 0}
        status, answer = asking(
            "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], **body, stop=stop
        )
        assert (status, answer["choices"][0]["message"]["content"]) == (200, own.text.partition(stop)[0])
        status, events = asking(
            "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], **body, stop=stop, stream=True
        )
        lines = [line for line in events.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == own.text.partition(stop)[0]
        status, answer = asking("/v1/responses", input=PROMPT, max_output_tokens=5, temperature=0)
        assert (status, answer["output"][0]["content"][0]["text"]) == (200, own.text)  # whole: no stream was asked for
        status, answer = asking("/v1/chat/completions", messages=[{"role": "assistant", "content": PROMPT}])
        assert (status, answer["error"]["message"][:30]) == (400, "Conversation roles must altern")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_right_after_it_told_where_it_serves_ends_it_in_order(
    run_cli: Any, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr("moetool.cli.next_step.tell", lambda _: signal.raise_signal(sent))
    result = run_cli("serve", tiny_mixtral, "--port", 0)
    assert result.code == 0, result.stderr
    assert result.stderr.endswith("until Ctrl-C.\n")


def test_nothing_more_is_generated_for_who_has_hung_up(tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for an answer that is being generated, nor for one that waits for its turn."""
    from moetool.talk import app

    events, tokens = list[threading.Event](), list[int]()
    began, may_go_on = threading.Event(), threading.Event()
    heard_of = app.gone

    def gone() -> threading.Event:
        events.append(heard_of())
        return events[-1]

    def counted(ids: Any, scores: Any) -> Any:
        tokens.append(ids.shape[1])
        began.set()
        assert may_go_on.wait(60)
        return only_numbers(ids, scores)

    monkeypatch.setattr(app, "gone", gone)
    monkeypatch.setattr(app, "only_numbers", counted)
    with served(tiny_mixtral) as address:
        host, _, port = address.rpartition(":")
        body = json.dumps({"prompt": PROMPT, "max_tokens": 20, "temperature": 0})
        head = f"Host: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        asked = f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode()
        with socket.create_connection((host, int(port))) as first, socket.create_connection((host, int(port))) as later:
            first.sendall(asked)
            assert began.wait(60)
            later.sendall(asked)
            while len(events) < 2:  # until the server has read it
                asking_at(address)("/health")
        for event in events:
            assert event.wait(60)
        may_go_on.set()
        status, answer = asking_at(address)("/v1/completions", prompt=PROMPT, max_tokens=3, temperature=0)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert len(tokens) == 1 + 3


def test_llama_cpps_server_is_not_asked_for_several_answers() -> None:
    """It would give one without a word."""
    passed, told = list[object](), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(json.loads((await receive())["body"]))

    async def send(message: Any) -> None:
        told.append(message)

    def post(**body: object) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        asyncio.run(_Asked(app, may_be_empty=True)(scope, receive, send))

    post(n=1, best_of=None)
    assert (passed, told) == ([{"n": 1, "best_of": None}], [])
    for several in ({"n": 2}, {"best_of": 3}):
        told.clear()
        post(**several)
        start, message = told
        assert start["status"] == 400
        assert json.loads(message["body"])["error"]["message"].startswith(f"{next(iter(several))}: ")
    assert len(passed) == 1
