"""What is learnt of conversations, for every family of chat templates, whatever is said in them.

The oracle knows no search: it renders a conversation up to an answer with a word in its place that stands nowhere else,
which shows what the template writes before and after it, and takes from the table of families what ends a turn.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, SPECIAL, Family
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moetool.errors import InvalidInputError
from moetool.tune.chat import Conversations, tokens_of
from moetool.tune.examples import IGNORED, Example, example_of, load_examples

SENTINEL = "Qzx7Qzx"
Messages = list[dict[str, Any]]

# Words that templates use themselves, blanks at the ends, and the like.
ANSWERS = [
    *(
        "a",
        "s",
        "I",
        "n",
        "\n",
        "assistant",
        "user",
        "model",
        "INST",
        "[/INST]",
        "im_start",
        "system\n",
        "end",
        " ",
        "",
    ),
    *("ASSISTANT:", "### Response:", "Response", " a", "a ", "\na", "a\n\n", "  two  ", "think", "same", "Assistant"),
]


def trained(model: Any, normalizer: Any, splitter: Any, decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoder
    texts = [family.template for family in FAMILIES.values()] + [" ".join(ANSWERS), "\n\n\n  \n same same a I"] * 20
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), *"".join(texts), "▁", SENTINEL[0]})
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("\\n", "\n") for text in texts], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """As GPT-2's and Llama 3's: joins line breaks and blanks with what follows."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), None, splitter, decoders.ByteLevel())


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """As Llama 2's: a blank before whatever comes first, and no words, so that tokens reach across anything."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return trained(models.BPE(), normalizer, pre_tokenizers.Split("\x00", "isolated"), decoder)


@pytest.fixture(params=["byte_level", "sentence_piece"])
def make(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """A tokenizer of either kind with a family's template."""
    trained_one: Tokenizer = request.getfixturevalue(request.param)
    return lambda name: tokenizer_of(trained_one, FAMILIES[name])


def tokenizer_of(trained_one: Tokenizer, family: Family) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=trained_one, bos_token="<s>", eos_token=family.eos, chat_template=family.template
    )


def examples_of(tokenizer: Any, record: dict[str, Any], tmp_path: Path) -> list[Example]:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record))
    return load_examples(str(path), tokenizer, 4096).items


def learnt_of(tokenizer: Any, messages: Messages, first: int = 0) -> list[Example]:
    return [example_of(*tokens_of(tokenizer, found)) for found in Conversations(tokenizer).spoken(messages, first)]


def decoded(tokenizer: Any, ids: Any) -> str:
    return bare(tokenizer, str(tokenizer.decode(list(ids), skip_special_tokens=False)))


def bare(tokenizer: Any, text: str) -> str:
    """A text, without blanks where the tokenizer puts some of its own in it."""
    return text if tokenizer.backend_tokenizer.normalizer is None else text.replace(" ", "").replace("▁", "")


def runs(example: Example) -> Iterator[tuple[int, int]]:
    """Where tokens are learnt."""
    edges = [
        place
        for place, (one, other) in enumerate(pairwise([IGNORED, *example.labels, IGNORED]))
        if (one == IGNORED) != (other == IGNORED)
    ]
    return zip(edges[::2], edges[1::2], strict=True)


def expected(tokenizer: Any, family: Family, messages: Messages, number: int) -> tuple[str, str]:
    """The prompt of one answer, and what is learnt after it."""
    prompt = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
    said = messages[number]["content"]
    marked = [*messages[:number], {**messages[number], "content": SENTINEL}]
    before, after = tokenizer.apply_chat_template(marked, tokenize=False).split(SENTINEL)
    assert before == prompt + family.thought
    assert after.startswith(family.end) or not after.strip()
    return prompt, family.thought + family.written(said) + family.end


def check(tokenizer: Any, family: Family, messages: Messages, first: int = 0) -> None:
    wanted = [
        expected(tokenizer, family, messages, number)
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= first
    ]
    found = []
    for example in learnt_of(tokenizer, messages, first):
        assert all(label in (token, IGNORED) for token, label in zip(example.ids, example.labels, strict=True))
        for start, stop in runs(example):
            before = decoded(tokenizer, example.ids[:start])
            alone = tokenizer(wanted[len(found)][0], add_special_tokens=False)["input_ids"]
            if not found:
                assert list(example.ids[:start]) == alone
            found.append((before, decoded(tokenizer, example.ids[start:stop])))
    assert found == [(bare(tokenizer, prompt), bare(tokenizer, said)) for prompt, said in wanted]


def talk(*said: str, system: bool = False) -> Messages:
    roles = ["system"] * system + ["user", "assistant"] * len(said)
    return [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_adversarial_answers(make: Any, name: str) -> None:
    tokenizer, family = make(name), FAMILIES[name]
    for answer in ANSWERS:
        check(tokenizer, family, talk("same", answer))
        check(tokenizer, family, talk(answer or "?", answer, "and now?", answer))
    if family.system:
        check(tokenizer, family, talk("assistant", "hi", "same", "same", "a", system=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_several_turns_share_a_text_unless_the_template_writes_them_differently(
    byte_level: Tokenizer, name: str, tmp_path: Path
) -> None:
    tokenizer, family = tokenizer_of(byte_level, FAMILIES[name]), FAMILIES[name]
    messages = [*talk("one?", "first", "two?", "second", "three?", "third"), {"role": "user", "content": "open"}]
    check(tokenizer, family, messages)
    found = learnt_of(tokenizer, messages)
    apart = family.rewrites or name in ("alpaca", "glm4")  # those have no end of their own
    assert len(found) == (3 if apart else 1)
    if not apart:
        assert decoded(tokenizer, found[0].ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    check(tokenizer, family, messages[:4], first=3)


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "?", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", "<think>\n\n</think>\n\n\n<tool_call>\n"
                  '{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>'),
        ("llama3", '<|python_tag|>{"name": "weather", "arguments": {"city": "Ulm"}}<|eom_id|>'),
        ("mistral-tools", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]</s>'),
    ],
)  # fmt: skip
def test_tool_calls_are_learnt_and_tools_are_read(byte_level: Tokenizer, name: str, said: str, tmp_path: Path) -> None:
    tokenizer, family = tokenizer_of(byte_level, FAMILIES[name]), FAMILIES[name]
    messages = [
        {"role": "user", "content": "Ulm?"},
        {"role": "assistant", "content": None, "tool_calls": [call(city="Ulm")]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "tool_calls": None},
    ]
    for tools in (TOOLS, json.dumps(TOOLS)):
        found = examples_of(tokenizer, {"messages": messages, "tools": tools}, tmp_path)
        learnt = [decoded(tokenizer, example.ids[start:stop]) for example in found for start, stop in runs(example)]
        assert learnt == [said, family.thought + "It rains." + family.end]
        assert '"description": "?"' in decoded(tokenizer, found[0].ids)


def refused(tokenizer: Any, messages: Messages, tmp_path: Path) -> str:
    with pytest.raises(InvalidInputError) as error:
        examples_of(tokenizer, {"messages": messages}, tmp_path)
    return str(error.value)


def test_what_a_template_cannot_do_is_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    mistral = tokenizer_of(byte_level, FAMILIES["mistral"])
    assert "record 1 cannot be used: Conversation roles must alternate" in refused(
        mistral, talk("be brief", "hi", "a", system=True), tmp_path
    )
    chatml = tokenizer_of(byte_level, FAMILIES["chatml"])
    calling = {"role": "assistant", "content": "", "tool_calls": [call(city="Ulm")]}
    assert "does not write tool calls" in refused(chatml, [{"role": "user", "content": "?"}, calling], tmp_path)
    chatml.eos_token, chatml.chat_template = None, FAMILIES["glm4"].template
    assert "a token that ends an answer" in refused(chatml, talk("hi", "a"), tmp_path)
    chatml.chat_template = (  # as DeepSeek-R1's, which prompts for thoughts that it does not write
        "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
    )
    assert r'prompts for an answer with "<think>\n", but writes "a</s>" there' in refused(
        chatml, talk("hi", "a"), tmp_path
    )
    for odd in ("hi", [], [1], [{"content": "x"}], [{"role": "user", "content": 5}]):
        assert "cannot be used" in refused(chatml, odd, tmp_path)  # type: ignore[arg-type]


def test_a_greeting_is_learnt(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level, FAMILIES["chatml"])
    (found,) = examples_of(tokenizer, {"messages": talk("", "a")[1:]}, tmp_path)
    assert [decoded(tokenizer, found.ids[start:stop]) for start, stop in runs(found)] == ["a<|im_end|>"]


def test_thoughts_are_learnt_with_the_answer_that_they_led_to(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level, FAMILIES["qwen3"])
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "reasoning_content": "hm", "content": "first"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nsecond"},
    ]
    found = examples_of(tokenizer, {"messages": messages}, tmp_path)
    assert [decoded(tokenizer, example.ids[start:stop]) for example in found for start, stop in runs(example)] == [
        "<think>\nhm\n</think>\n\nfirst<|im_end|>",
        "<think>\nso\n</think>\n\nsecond<|im_end|>",
    ]
    assert "hm" not in decoded(tokenizer, found[1].ids)


def test_markers_decide(byte_level: Tokenizer, tmp_path: Path) -> None:
    """A template may have more of an answer learnt than what follows the prompt, or only the last."""
    tokenizer = tokenizer_of(byte_level, FAMILIES["marked"])
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' }}{% if loop.last %}{% generation %}"
        "{{ message.role + '\n' + message.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message.role + '\n' + message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    (found,) = examples_of(tokenizer, {"messages": talk("one?", "first", "two?", "second")}, tmp_path)
    assert [decoded(tokenizer, found.ids[start:stop]) for start, stop in runs(found)] == ["assistant\nsecond<|im_end|>"]


def test_text_in_parts(byte_level: Tokenizer) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    talks = Conversations(tokenizer_of(byte_level, FAMILIES["chatml"]))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": parts}]
    assert talks.spoken(messages) == talks.spoken(talk("hi", "hello"))
    assert not talks.adds_end
