"""Answers of a GGUF file in llama.cpp, where llama-cpp-python is installed: those of the checkpoint."""

from pathlib import Path

import pytest
from conftest import RunCli

from moetool.errors import InvalidInputError, UsageError
from moetool.talk.checkpoint import CheckpointTalker
from moetool.talk.conversation import Conversation
from moetool.talk.gguf import GgufTalker
from moetool.talk.options import ChatOptions, gguf_file

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
