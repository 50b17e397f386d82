"""Training examples: what is learnt of each kind of record, and that packed ones keep to themselves."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import build_dense
from torch.nn import functional as F

from moetool.errors import InvalidInputError
from moetool.tune.examples import IGNORED, Example, collate, load_examples, pack
from moetool.tune.trainer import keeps_apart

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    """The tiny one with a chat template."""
    tiny_tokenizer.chat_template = TEMPLATE
    yield tiny_tokenizer
    tiny_tokenizer.chat_template = None


def jsonl(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def learnt(example: Example, tokenizer: Any) -> str:
    return tokenizer.decode([label for label in example.labels if label != IGNORED])


def test_only_what_the_assistant_says_is_learnt(tokenizer: Any, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "not answered"},
    ]
    (example,) = load_examples(jsonl(tmp_path / "a.jsonl", {"messages": messages}), tokenizer, 128).items
    assert learnt(example, tokenizer) == "first<|end|>second<|end|>"
    assert tokenizer.decode(list(example.ids)) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert all(label in (token, IGNORED) for token, label in zip(example.ids, example.labels, strict=True))


def test_only_the_completion_of_a_conversation_is_learnt(tokenizer: Any, tmp_path: Path) -> None:
    turns = [("user", "yes"), ("assistant", "yes"), ("user", "assistant"), ("assistant", "\nno")]
    messages = [{"role": role, "content": content} for role, content in turns]
    pair = {"prompt": messages[:3], "completion": messages[3:]}
    (example,) = load_examples(jsonl(tmp_path / "a.jsonl", pair), tokenizer, 128).items
    assert learnt(example, tokenizer) == "\nno<|end|>"
    assert tokenizer.decode(list(example.ids)) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_the_tokenizer_says_how_rows_begin(bos_tokenizer: Any, tiny_text: Path, tmp_path: Path) -> None:
    """All but conversations, whose template does."""
    first = bos_tokenizer.bos_token_id
    rows = load_examples(str(tiny_text), bos_tokenizer, 64).items
    assert {row.ids[0] for row in rows} == {first}
    assert {len(row.ids) for row in rows[:-1]} == {64}
    whole = bos_tokenizer(tiny_text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    assert [token for row in rows for token in row.ids[1:]] == whole
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "two", "completion": " four"}, {"text": "all of it"})
    for bos, begins in (("auto", True), ("always", True), ("never", False)):
        pair, text = load_examples(data, bos_tokenizer, 64, bos).items  # type: ignore[arg-type]
        assert [item.ids.count(first) for item in (pair, text)] == [begins, begins]
        assert [item.ids[0] == first for item in (pair, text)] == [begins, begins]
        assert learnt(pair, bos_tokenizer) == " four<|end|>"


def test_completions_and_texts(tokenizer: Any, tmp_path: Path) -> None:
    pair = {"prompt": "two and two", "completion": " is four", "text": None}
    data = jsonl(
        tmp_path / "a.jsonl", pair, {"prompt": None, "completion": None, "text": "all of it"}, {"content": "here"}
    )
    first, second, third = load_examples(data, tokenizer, 128).items
    assert learnt(first, tokenizer) == " is four<|end|>"
    assert tokenizer.decode(list(first.ids)) == "two and two is four<|end|>"
    assert learnt(second, tokenizer) == "all of it<|end|>"
    assert learnt(third, tokenizer) == "here<|end|>"


def test_a_text_file_is_a_stream(tokenizer: Any, tiny_text: Path) -> None:
    found = load_examples(str(tiny_text), tokenizer, 64)
    whole = tokenizer(tiny_text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    assert [token for item in found.items for token in item.ids] == whole
    assert {len(item.ids) for item in found.items[:-1]} == {64}
    assert found.truncated == found.silent == 0


def test_what_is_cut_and_what_is_left_out_is_counted(tokenizer: Any, tmp_path: Path) -> None:
    long, short = "word " * 50, {"prompt": "a", "completion": "b"}
    records = (short, {"prompt": long, "completion": "never seen"}, {"prompt": "a", "completion": long})
    found = load_examples(jsonl(tmp_path / "a.jsonl", *records), tokenizer, 16)
    assert (len(found.items), found.truncated, found.silent) == (2, 2, 1)
    assert len(found.items[1].ids) == 16
    with pytest.raises(InvalidInputError, match="nothing to learn: of 1 examples, 1 of them cut at 16"):
        load_examples(jsonl(tmp_path / "b.jsonl", records[1]), tokenizer, 16)


def test_records_that_cannot_be_used(tiny_tokenizer: Any, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"question": "?", "answer": "!"})
    with pytest.raises(InvalidInputError, match="prompt and completion, text, content; it has question, answer"):
        load_examples(data, tiny_tokenizer, 16)
    empty = jsonl(tmp_path / "d.jsonl", {"text": "is there"}, {"text": None, "id": 2})
    with pytest.raises(InvalidInputError, match=r"record 2 cannot be used.* it has text \(null\), id"):
        load_examples(empty, tiny_tokenizer, 16)
    talk = jsonl(tmp_path / "b.jsonl", {"messages": [{"role": "assistant", "content": "hi"}]})
    with pytest.raises(InvalidInputError, match="no chat template"):
        load_examples(talk, tiny_tokenizer, 16)
    tiny_tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(InvalidInputError, match="record 1 cannot be used: no system message"):
        load_examples(talk, tiny_tokenizer, 16)
    tiny_tokenizer.chat_template = None
    with pytest.raises(InvalidInputError, match="No such file"):
        load_examples(str(tmp_path / "c.jsonl"), tiny_tokenizer, 16)


def test_packing_many_is_quick() -> None:
    """One look at most per possible room, whatever the number of rows."""
    examples = [Example((1,) * n, (1,) * n) for n in range(300, 700)] * 50
    began = time.process_time()
    rows = pack(examples, 1024)
    assert time.process_time() - began < 5
    assert sum(map(len, rows)) == len(examples)


@pytest.mark.parametrize(("family", "apart"), [("llama", True), ("gpt_neox", True), ("opt", False)])
def test_families_whose_attention_does_not_heed_positions_are_found(family: str, apart: bool) -> None:
    assert keeps_apart(build_dense(family)) is apart


def random_examples(count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 40, (), generator=generator))
        ids = torch.randint(288, (length,), generator=generator).tolist()
        found.append(Example(tuple(ids), tuple([IGNORED] * (length // 2) + ids[length // 2 :])))
    return found


def test_packing_loses_nothing() -> None:
    examples = random_examples(30)
    rows = pack(examples, 64)
    assert sorted(example.ids for row in rows for example in row) == sorted(example.ids for example in examples)
    assert max(sum(len(example.ids) for example in row) for row in rows) <= 64
    assert len(rows) < sum(len(example.ids) for example in examples) / 64 * 1.2 + 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_packed_examples_do_not_see_each_other(family: str) -> None:
    """The summed loss and its gradient are those of every example alone, without padding."""
    model, examples = build_dense(family), random_examples(9)

    def summed(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        targets = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")

    packed = summed(collate(pack(examples, 64)))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.stack([summed(collate([[example]])) for example in examples]).sum()
    alone.backward()
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)
