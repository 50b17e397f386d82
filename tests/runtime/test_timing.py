"""Seconds of prompts and of tokens after them: which calls they are of."""

from typing import Any

import pytest
import torch
from dense_families import build_dense
from families import build
from kinds import KINDS

from moetool.errors import InvalidInputError, ResourceError
from moetool.quiet import quiet
from moetool.runtime.cache_name import cache_in
from moetool.runtime.timing import time_decode


class Watched(torch.nn.Module):
    """A model that notes how it is called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.device = model, model.config, model.device
        self.calls: list[dict[str, Any]] = []

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, logits_to_keep: int = 0, **arguments: Any) -> Any:
        cache = cache_in(arguments)
        self.calls.append({**arguments, "kept": logits_to_keep, "held": cache.get_seq_length() if cache else 0})
        return self.model(logits_to_keep=logits_to_keep, **arguments)


def test_a_prompt_and_then_one_token_at_a_time() -> None:
    model = Watched(build("mixtral"))
    seconds = time_decode(model, 2, 5, 3, seed=1)
    assert seconds.prefill > 0
    assert seconds.decode > 0
    assert [tuple(call["input_ids"].shape) for call in model.calls] == [(2, 5), (2, 1), (2, 1), (2, 1)]
    assert [call["held"] for call in model.calls] == [0, 5, 6, 7]
    assert model.calls[0]["kept"] == 1
    again = Watched(build("mixtral"))
    time_decode(again, 2, 5, 3, seed=1)
    for one, other in zip(model.calls, again.calls, strict=True):
        assert one["input_ids"].equal(other["input_ids"]), "the same tokens for the same seed"
    time_decode(again, 2, 5, 3, seed=2)
    assert not again.calls[-1]["input_ids"].equal(model.calls[-1]["input_ids"])


def test_a_prompt_is_all_of_what_mixes_masks() -> None:
    """As in `generate`: SIMoE mixes experts by a prompt's last token, and by the first of a text to be scored."""
    model, seen = KINDS["masks"](), []
    choose = model.model.interpolation.choose
    model.model.interpolation.choose = lambda hidden: seen.append(hidden) or choose(hidden)
    prompt = torch.randint(288, (2, 8), generator=torch.Generator().manual_seed(1))[:, :5]
    with torch.inference_mode():
        time_decode(model, 2, 5, 3, seed=1)
        with model.model.interpolation.frozen():
            last = model.model(input_ids=prompt, use_cache=False).last_hidden_state[:, -1]
    [hidden] = seen
    torch.testing.assert_close(hidden, last)


def test_a_prompt_alone_caches_nothing() -> None:
    model = Watched(build_dense("llama"))
    assert time_decode(model, 1, 4, 0).decode == 0
    assert [call["use_cache"] for call in model.calls] == [False]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "neurons-encoder"])
def test_every_kind_decodes(kind: str) -> None:
    with quiet():
        seconds = time_decode(KINDS[kind]().eval(), 2, 4, 2)
    assert min(seconds) > 0


def test_an_encoder_has_a_pass_alone() -> None:
    model = build_dense("bert")
    assert time_decode(model, 2, 6, 0).prefill > 0
    with pytest.raises(InvalidInputError, match="bert keeps no cache"):
        time_decode(model, 2, 6, 1)


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_dense("llama")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(model.model, "forward", full)
    with pytest.raises(ResourceError, match="4 prompts of 6 tokens do not fit"):
        time_decode(model, 4, 6, 1)
