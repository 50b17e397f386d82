"""Answers of a GGUF file in llama.cpp, where llama-cpp-python is installed: those of the checkpoint."""

import sys
from pathlib import Path

import pytest
from conftest import RunCli

from moetool.errors import InvalidInputError, UsageError
from moetool.talk.checkpoint import CheckpointTalker
from moetool.talk.conversation import Conversation
from moetool.talk.gguf import GgufTalker
from moetool.talk.options import ChatOptions, ServeOptions, gguf_file
from moetool.talk.requests import EMPTY_PROMPT, NO_TEMPLATE
from moetool.talk.server import _gguf_app

pytest.importorskip("llama_cpp", reason="wants moetool[llama-cpp]")


@pytest.fixture(scope="module")
def exported(run_cli: RunCli, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_mixtral` as a GGUF file in fp32."""
    target = tmp_path_factory.mktemp("gguf") / "out"
    assert run_cli("export", tiny_mixtral, target, "--format", "gguf", "--type", "f32").code == 0
    file = gguf_file(str(target))
    assert file is not None
    return file


def test_answers_are_those_of_the_checkpoint(tiny_mixtral: Path, exported: Path) -> None:
    options = ChatOptions(max_tokens=6)
    own, theirs = CheckpointTalker(str(tiny_mixtral), options), GgufTalker(exported, options)
    for text in ("one two", "three", "four five"):
        told = [
            Conversation(talker).say(text, lambda _: None).text.encode("ascii", "ignore") for talker in (own, theirs)
        ]
        shorter, longer = sorted(told, key=len)  # halves of characters are kept in one, and not in the other
        assert shorter
        assert longer.startswith(shorter)


def test_what_llama_cpp_refuses(exported: Path, tmp_path: Path) -> None:
    talk = Conversation(GgufTalker(exported, ChatOptions(max_tokens=6, context=256)))
    with pytest.raises(UsageError, match="exceed context window of 256"):
        talk.say("one two three " * 200, print)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidInputError, match=r"llama.cpp cannot load .*model\.gguf"):
        GgufTalker(tmp_path / "model.gguf", ChatOptions())
    (tmp_path / "text.gguf").write_text("words of a text")
    with pytest.raises(InvalidInputError, match=r"text\.gguf is no GGUF file"):
        GgufTalker(tmp_path / "text.gguf", ChatOptions())


def test_a_chat_without_a_template_is_refused_by_the_server(exported: Path) -> None:
    """llama-cpp-python would write it as for Llama 2."""
    pytest.importorskip("llama_cpp.server.app", reason="wants moetool[llama-cpp]")
    client = pytest.importorskip("starlette.testclient", reason="wants httpx").TestClient
    with client(_gguf_app("mine", exported, ServeOptions(context=256))) as asked:
        answer = asked.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "one"}]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, NO_TEMPLATE)
        answer = asked.post("/v1/completions", json={"prompt": "one", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "asked_for", [{}, {"prompt": ""}, {"prompt": []}, {"prompt": [""]}, {"prompt": "", "stream": True}]
)
def test_an_empty_prompt_is_refused_by_the_server(exported: Path, asked_for: dict[str, object]) -> None:
    """llama-cpp-python fails at it: `tiny_mixtral`'s tokenizer begins texts with no token."""
    pytest.importorskip("llama_cpp.server.app", reason="wants moetool[llama-cpp]")
    client = pytest.importorskip("starlette.testclient", reason="wants httpx").TestClient
    with client(_gguf_app("mine", exported, ServeOptions(context=256))) as asked:
        answer = asked.post("/v1/completions", json=asked_for)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, EMPTY_PROMPT)
        for prompt in (" ", ["one"]):
            assert asked.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("body", [b"{", b"", b"[1, 2]", b"null"])
def test_a_body_that_is_no_object_is_refused_by_the_server(exported: Path, body: bytes) -> None:
    """llama-cpp-python fails at it while it tells of the error."""
    pytest.importorskip("llama_cpp.server.app", reason="wants moetool[llama-cpp]")
    client = pytest.importorskip("starlette.testclient", reason="wants httpx").TestClient
    with client(_gguf_app("mine", exported, ServeOptions(context=256))) as asked:
        answer = asked.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("The body is not a JSON object: ")


def test_the_library_that_is_missing_is_named(run_cli: RunCli, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server wants more of them than `chat` does."""
    pytest.importorskip("uvicorn", reason="wants moetool[serve]")
    monkeypatch.setitem(sys.modules, "llama_cpp.server", None)
    result = run_cli("serve", exported, "--port", 0)
    assert (result.code, "the library llama_cpp.server is not installed" in result.stderr) == (2, True)
