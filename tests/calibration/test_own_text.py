"""Text that a model writes itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moetool.calibration import own_text, readable
from moetool.calibration.data import DataSpec, iter_text
from moetool.calibration.own_text import sampled_windows
from moetool.errors import InvalidInputError, UsageError, VerificationError

Sample = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """`little_text(by_kind)`: the bundled text that the tokenizer can read; at first of one kind and short."""

    def make(texts: dict[str, str]) -> None:
        monkeypatch.setattr(own_text, "kinds", lambda: tuple(texts))
        monkeypatch.setattr(readable, "readable_text", lambda kinds, tokenizer: readable.ReadableText(texts, ()))

    make({"code": "return the value of all\n" * 40})
    return make


@pytest.fixture(scope="module")
def sample(make_mixtral: Any, tiny_tokenizer: Any) -> Sample:
    """`sample(windows=4, seed=0, …)`: windows of 24 tokens of a random model."""
    model = make_mixtral()

    def make(**changes: Any) -> Tensor:
        options = {"windows": 4, "length": 24, "temperatures": (1.0,), "opening": [], "seed": 0}
        return sampled_windows(model, changes.pop("tokenizer", tiny_tokenizer), **{**options, **changes})

    return make


def test_the_same_for_the_same_seed(sample: Sample) -> None:
    once = sample()
    assert once.shape == (4, 24)
    assert torch.equal(sample(), once)
    assert not torch.equal(sample(seed=1), once)


def test_nothing_global_is_drawn_from(sample: Sample) -> None:
    before = torch.random.get_rng_state()
    sample()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_special_tokens(sample: Sample, tiny_tokenizer: Any) -> None:
    """Hot enough that a random model would give some: 2,048 tokens of 288 kinds."""
    found = sample(windows=64, length=32, temperatures=(2.0,))
    assert not set(tiny_tokenizer.all_special_ids) & set(found.flatten().tolist())
    assert found.max() < len(tiny_tokenizer)


def test_cold_text_is_the_likeliest(sample: Sample, make_mixtral: Any, tiny_tokenizer: Any) -> None:
    """As temperature goes to zero, each token is the model's first choice, special ones left out."""
    windows, model = sample(temperatures=(1e-6,)), make_mixtral()
    start = torch.full((4, 1), tiny_tokenizer.bos_token_id or tiny_tokenizer.eos_token_id)
    with torch.inference_mode():
        logits = model(input_ids=torch.cat([start, windows], 1)).logits[:, :-1]
        logits[:, :, tiny_tokenizer.all_special_ids] = -torch.inf
    begun = own_text.PROMPT_TOKENS
    assert torch.equal(logits.argmax(-1)[:, begun:], windows[:, begun:])


def test_drawn_as_predicted(tiny_tokenizer: Any) -> None:
    """20,000 rows of the same logits: frequencies are those of the softmax at that temperature."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, -1.0]])
    rows, stream = 20_000, torch.Generator().manual_seed(0)
    draw = own_text._Draw([0.7] * rows, [stream] * rows, _Known(5, [4]))
    found = draw(torch.empty(0), logits.expand(rows, -1)).argmax(-1)
    expected = (logits[0, :4] / 0.7).softmax(0)
    assert torch.allclose(found.bincount(minlength=5)[:4] / rows, expected, atol=0.01)


class _Known:
    """A tokenizer of which no more is known than how many tokens it has, and which are special."""

    bos_token_id = eos_token_id = None

    def __init__(self, size: int, special: list[int]) -> None:
        self._size, self.all_special_ids = size, special

    def __len__(self) -> int:
        return self._size


def test_damaged_models(tiny_tokenizer: Any) -> None:
    draw = own_text._Draw([1.0], [torch.Generator()], tiny_tokenizer)
    with pytest.raises(VerificationError, match="NaN or infinity"):
        draw(torch.empty(0), torch.full((1, 288), torch.nan))


def test_windows_begin_with_text_of_every_kind(sample: Sample, little_text: Any, tiny_tokenizer: Any) -> None:
    """Words of two kinds, and of none, in turn."""
    little_text({"code": "x" * 600, "prose": "y" * 600})
    found = [tiny_tokenizer.decode(row[: own_text.PROMPT_TOKENS]) for row in sample(windows=6)]
    assert [set(text) for text in found[:2]] == [set(text) for text in found[3:5]] == [{"x"}, {"y"}]
    assert all(len(set(text)) > 1 for text in found[2::3])


def test_nothing_to_begin_with(sample: Sample, little_text: Any) -> None:
    little_text({})
    assert sample().shape == (4, 24)
    with pytest.raises(InvalidInputError, match="no BOS, no EOS"):
        sample(tokenizer=_Known(288, []))


@pytest.mark.parametrize(("text", "temperatures"), [("self", (0.7, 1.0)), ("self:0.5", (0.5,)), ("self:2@3", (2.0,))])
def test_temperatures(text: str, temperatures: tuple[float, ...]) -> None:
    spec = DataSpec.parse(text)
    assert spec.is_self
    assert spec.temperatures == temperatures


@pytest.mark.parametrize("text", ["self:0", "self:2.5", "self:hot", "self:nan", "self:1:train", "self:::text"])
def test_what_it_does_not_have(text: str) -> None:
    with pytest.raises(UsageError, match=r"self\[:TEMPERATURE\]"):
        DataSpec.parse(text)


def test_a_file_of_that_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "own.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    assert "".join(iter_text(DataSpec.parse("self"))) == "a text"
