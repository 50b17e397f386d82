"""Answers of a checkpoint: those of the whole conversation run anew, by the template or as plain text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chat_templates import FAMILIES
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetool.errors import InvalidInputError, UsageError
from moetool.talk.checkpoint import CheckpointTalker
from moetool.talk.conversation import Conversation, Turn, plain_prompt
from moetool.talk.options import ChatOptions

TEXTS = ("one two", "three", "four five six")


@pytest.fixture
def templated(tiny_mixtral: Path, tmp_path: Path) -> Callable[[str], Path]:
    """`templated(family)`: the tiny model with more positions, and that family's chat template; "" has none."""

    def made(family: str) -> Path:
        model = shutil.copytree(tiny_mixtral, tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
        if family:
            (model / "chat_template.jinja").write_text(FAMILIES[family].template)
        return model

    return made


def anew(path: Path, messages: list[Turn], new_tokens: int) -> str:
    """What transformers' own `generate` answers to all messages, without keys and values of earlier turns."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(plain_prompt(messages), return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("family", ["chatml", "mistral-tools", "zephyr", ""])
def test_answers_are_those_of_the_whole_conversation(templated: Callable[[str], Path], family: str) -> None:
    path = templated(family)
    talk, written = Conversation(CheckpointTalker(str(path), ChatOptions(max_tokens=6))), []
    for text in TEXTS:
        asked: list[Turn] = [*talk.messages, {"role": "user", "content": text}]
        answer = talk.say(text, written.append)
        assert answer.text == anew(path, asked, 6).strip()
        assert 0 < answer.tokens <= 6
    assert "".join(written)


def test_earlier_tokens_are_not_run_again(templated: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    talker = CheckpointTalker(str(templated("chatml")), ChatOptions(max_tokens=6))
    talk, run = Conversation(talker), []
    forward = talker._model.forward

    def counted(input_ids: torch.Tensor, **given: object) -> object:
        run.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **given)

    monkeypatch.setattr(talker._model, "forward", counted)
    talk.say("one two three four", print)
    first, run[:] = run[0], []
    prompt = talker._encode([*talk.messages, {"role": "user", "content": "one"}])
    talk.say("one", print)
    assert run[0] <= len(prompt) - first  # all but the first prompt


def test_a_conversation_that_outgrows_the_positions(tiny_mixtral: Path) -> None:
    talk = Conversation(CheckpointTalker(str(tiny_mixtral), ChatOptions(max_tokens=4)))
    with pytest.raises(UsageError, match=r"has \d+ tokens, and .* positions: begin a new one"):
        talk.say("one two three " * 2000, print)
    assert talk.say("one", print).text  # it goes on


def test_a_template_that_refuses(templated: Callable[[str], Path]) -> None:
    talk = Conversation(CheckpointTalker(str(templated("mistral")), ChatOptions()), "Be brief.")
    with pytest.raises(InvalidInputError, match="cannot write the conversation: Conversation roles must alternate"):
        talk.say("one", print)
