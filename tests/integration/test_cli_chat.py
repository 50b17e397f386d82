"""`moetool chat`, scripted, and what `chat` and `serve` refuse."""

import io
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import RunCli

SHORT = ("--max-tokens", 5)
SERVER = ("fastapi", "uvicorn", "openai")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`typed("a", "b")`: lines on standard input."""
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_each_line_is_answered_in_one_conversation(
    run_cli: RunCli, tiny_mixtral: Path, typed: Callable[..., None]
) -> None:
    typed("one two", "", "three", "/reset", "one two", "/exit", "never asked")
    result = run_cli("chat", tiny_mixtral, *SHORT)
    assert result.code == 0, result.stderr
    assert "has no chat template: turns are given as text after 'User:' and 'Assistant:'" in result.stderr
    assert "3 answers, " in result.stderr
    typed("one two")
    alone = run_cli("chat", tiny_mixtral, *SHORT)
    assert result.stdout.startswith(alone.stdout)
    assert result.stdout.endswith(alone.stdout)
    assert len(result.stdout) > 2 * len(alone.stdout)


def test_a_command_that_there_is_not_is_no_message_in_a_terminal(
    run_cli: RunCli, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["/help", "/quit", "one two", "/exit"])
    monkeypatch.setattr("moetool.cli.commands.chat.standard_input", lambda: SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    result = run_cli("chat", tiny_mixtral, *SHORT)
    assert result.code == 0, result.stderr
    assert result.stderr.count("/reset begins a new conversation, /exit ends") == 3  # at the beginning, and for each
    assert "1 answer, " in result.stderr


@pytest.mark.parametrize("model", ["compressed", "dense"])
def test_compressed_and_dense_models_talk(
    run_cli: RunCli,
    tiny_mixtral: Path,
    dense: Callable[..., Path],
    tmp_path: Path,
    typed: Callable[..., None],
    model: str,
) -> None:
    path = dense("llama")
    if model == "compressed":
        path = tmp_path / "out"
        assert (
            run_cli("compress", tiny_mixtral, path, "--method", "quantize", "--bits", 4, "--group-size", 32).code == 0
        )
    typed("one two")
    result = run_cli("chat", path, *SHORT, "--temperature", 1, "--seed", 3)
    assert result.code == 0, result.stderr
    assert "1 answer, " in result.stderr
    typed("one two")
    assert run_cli("chat", path, *SHORT, "--temperature", 1, "--seed", 3).stdout == result.stdout


def test_a_script_ends_where_the_conversation_does_not_fit(
    run_cli: RunCli, tiny_mixtral: Path, typed: Callable[..., None]
) -> None:
    typed("one two three " * 2000, "one")
    result = run_cli("chat", tiny_mixtral, *SHORT)
    assert (result.code, result.stdout) == (2, "")
    assert "positions: begin a new one (/reset)" in result.stderr


def test_text_that_is_not_utf8(run_cli: RunCli, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = b"caf\xe9\n"
    for arguments in (("chat",), ("generate", "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stray), encoding="utf-8"))
        result = run_cli(arguments[0], tiny_mixtral, *arguments[1:])
        assert (result.code, "is not UTF-8" in result.stderr) == (3, True), result.stderr
    text = stray.decode(errors="surrogateescape")
    for arguments in (("chat", tiny_mixtral, "--system", text), ("generate", tiny_mixtral, text)):
        result = run_cli(*arguments)
        assert (result.code, "is not UTF-8" in result.stderr) == (3, True), result.stderr


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_is_no_model_or_generates_nothing(
    run_cli: RunCli, dense: Callable[..., Path], tmp_path: Path, command: str
) -> None:
    for library in SERVER if command == "serve" else ():
        pytest.importorskip(library, reason="wants moetool[serve]")
    (tmp_path / "empty").mkdir()
    for path, code, said in (
        (tmp_path / "empty", 3, "config.json"),
        (tmp_path / "missing", 3, "No such directory"),
        (dense("bert"), 2, "is an encoder (bert): it generates nothing"),
    ):
        result = run_cli(command, path, *(("--port", 0) if command == "serve" else ()))
        assert (result.code, said in result.stderr) == (code, True), result.stderr


def test_a_port_in_use(run_cli: RunCli, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.talk.server._uvicorn", lambda: None)  # it is not needed to find that out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_cli("serve", tiny_mixtral, "--port", taken.getsockname()[1])
        said = f"Cannot listen at 127.0.0.1:{taken.getsockname()[1]}: Address already in use."
    assert (result.code, said in result.stderr) == (2, True)
    assert run_cli("serve", tiny_mixtral, "--host", "no.such.host.invalid").code == 2


def test_libraries_that_are_missing(
    run_cli: RunCli, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    result = run_cli("serve", tiny_mixtral)
    assert (result.code, "pip install 'moetool[serve]'" in result.stderr) == (2, True)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "model.gguf"):
        result = run_cli("chat", model)
        assert (result.code, "pip install 'moetool[llama-cpp]'" in result.stderr) == (2, True)


def test_options_of_the_other_engine(run_cli: RunCli, tiny_mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = run_cli("chat", tmp_path / "model.gguf", "--compute-dtype", "float32")
    assert (result.code, "--compute-dtype is for checkpoints" in result.stderr) == (2, True)
    result = run_cli("chat", tiny_mixtral, "--context", 64)
    assert (result.code, "--context is for .gguf files" in result.stderr) == (2, True)
