"""Models that moetool loads attend by its kernels, and generate what they did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moetool.checkpoint.reader import Checkpoint
from moetool.compiled.compiler import problem
from moetool.kernels import attention as kernels
from moetool.runtime import attention
from moetool.runtime.attention import MOETOOL_ATTENTION, attend_by_kernels
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.loading import load_model


@pytest.fixture(scope="module")
def wide_heads(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral in bf16 whose heads are as wide as vectors."""
    return save_model(make_mixtral(dtype=torch.bfloat16, head_dim=16), tmp_path_factory.mktemp("models") / "wide")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call of the kernels."""
    calls: list[int] = []

    def attend(*given: Any) -> torch.Tensor:
        calls.append(1)
        return kernels.attend(*given)

    monkeypatch.setattr(attention, "attend", attend)
    return calls


def logits(model: PreTrainedModel, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Of two tokens that follow two prompts, with a cache."""
    ids = torch.randint(0, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shown = {} if mask is None else {"attention_mask": mask[:, :10]}
        cache, found = cache_of(model(ids[:, :10], use_cache=True, **shown)), []
        for token in (10, 11):
            shown = {} if mask is None else {"attention_mask": mask[:, : token + 1]}
            found.append(model(ids[:, token : token + 1], **{CACHE: cache}, use_cache=True, **shown).logits)
    return torch.cat(found, 1).float()


@pytest.mark.skipif(bool(problem()), reason=problem())
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_attend_by_kernels(wide_heads: Path, padded: bool, counted: list[int]) -> None:
    model = load_model(Checkpoint.open(wide_heads), torch.bfloat16)
    assert model.config._attn_implementation == MOETOOL_ATTENTION
    assert "moetool" not in model.config.to_json_string()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 1 - padded
    found = logits(model, mask)
    assert len(counted) == 2 * model.config.num_hidden_layers
    model.set_attn_implementation("sdpa")
    expected = logits(model, mask)
    assert len(counted) == 2 * model.config.num_hidden_layers
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_other_attention_stays(wide_heads: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(wide_heads, attn_implementation="eager")
    attend_by_kernels(model)
    assert model.config._attn_implementation == "eager"


def test_without_kernels_torch_attends(wide_heads: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    model = load_model(Checkpoint.open(wide_heads), torch.bfloat16)
    monkeypatch.setattr(kernels, "problem", lambda: "there are none")
    found = logits(model)
    assert not counted
    model.set_attn_implementation("sdpa")
    assert found.equal(logits(model))
