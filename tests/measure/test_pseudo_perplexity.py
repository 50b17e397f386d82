"""Losses of windows: of causal models as ever, of encoders with every token hidden once."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import build_dense
from torch import Tensor
from transformers import BertForSequenceClassification

from moetool.errors import InvalidInputError
from moetool.measure.predictions import HiddenTokens, window_loss


@pytest.fixture(scope="module")
def bert() -> Any:
    return build_dense("bert")


@pytest.fixture(scope="module")
def windows(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[:33].view(3, 11)


@torch.no_grad()
def naive(model: Any, window: Tensor, mask: int, before: list[int], after: list[int]) -> float:
    """−log p of each token, all the others being there."""
    total = 0.0
    for place, token in enumerate(window.tolist()):
        ids = [*before, *window.tolist(), *after]
        ids[place + len(before)] = mask
        logits = model(torch.tensor([ids])).logits[0, place + len(before)]
        total -= logits.double().log_softmax(-1)[token].item()
    return total / len(window)


@pytest.mark.parametrize("rows", [1, 4, 11, 64])
def test_every_token_is_hidden_once(bert: Any, windows: Tensor, masking_tokenizer: Any, rows: int) -> None:
    found = window_loss(bert, windows, HiddenTokens(masking_tokenizer, rows))
    mask, end = masking_tokenizer.mask_token_id, masking_tokenizer.cls_token_id
    expected = [naive(bert, window, mask, [end], [end]) for window in windows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


def test_without_marks_there_are_none(bert: Any, windows: Tensor, tiny_tokenizer: Any, masking_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.mask_token = masking_tokenizer.mask_token
    found = window_loss(bert, windows[:1], HiddenTokens(tokenizer, 4))
    expected = naive(bert, windows[0], tokenizer.mask_token_id, [], [])
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_without_a_mask_token_it_cannot_be_told(bert: Any, windows: Tensor, tiny_tokenizer: Any) -> None:
    with pytest.raises(InvalidInputError, match="no mask token"):
        window_loss(bert, windows, HiddenTokens(tiny_tokenizer, 4))


def test_causal_losses_are_those_of_transformers(windows: Tensor) -> None:
    model = build_dense("gpt_neox")
    with torch.no_grad():
        expected = [model(row[None], labels=row[None]).loss.double() for row in windows]
    torch.testing.assert_close(window_loss(model, windows), torch.stack(expected), rtol=1e-6, atol=0)


@pytest.fixture
def checkpoint(save_model: Any, tmp_path: Path) -> Any:
    return lambda family, tokenizer: _saved(save_model, tmp_path / family, family, tokenizer)


def _saved(save_model: Any, path: Path, family: str, tokenizer: Any) -> Path:
    save_model(build_dense(family), path)
    tokenizer.save_pretrained(path)
    return path


def test_eval_of_an_encoder_fits_its_marks_into_the_context(
    run_cli: Any, checkpoint: Any, bert: Any, tiny_text: Path, tiny_tokens: Tensor, masking_tokenizer: Any
) -> None:
    path = checkpoint("bert", masking_tokenizer)
    result = run_cli("eval", path, "--data", tiny_text, "--windows", 1, "--json")
    assert result.code == 0, result.stderr
    assert (result.json["protocol"], result.json["sequence_length"]) == ("pseudo-perplexity", 126)
    end, mask = masking_tokenizer.cls_token_id, masking_tokenizer.mask_token_id
    expected = naive(bert, tiny_tokens[:126], mask, [end], [end])
    assert result.json["nll"] == pytest.approx(expected, rel=1e-5)
    assert result.json["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    for length in (127, 128, 129):
        refused = run_cli("eval", path, "--data", tiny_text, "--sequence-length", length)
        assert refused.code == 2
        assert "128 tokens, less 2 for marks" in refused.stderr


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_bigcode"])
def test_eval_of_a_causal_model_fills_its_context(
    run_cli: Any, checkpoint: Any, tiny_tokenizer: Any, tiny_text: Path, tiny_tokens: Tensor, family: str
) -> None:
    path = checkpoint(family, tiny_tokenizer)
    result = run_cli("eval", path, "--data", tiny_text, "--windows", 2, "--json")
    assert result.code == 0, result.stderr
    assert (result.json["protocol"], result.json["sequence_length"]) == ("perplexity", 128)
    expected = window_loss(build_dense(family), tiny_tokens[:256].view(2, 128)).mean().item()
    assert result.json["nll"] == pytest.approx(expected, rel=1e-5)
    refused = run_cli("eval", path, "--data", tiny_text, "--sequence-length", 129)
    assert refused.code == 2
    assert "context of 128 tokens" in refused.stderr


def test_an_encoder_beside_another(
    run_cli: Any,
    bert: Any,
    save_model: Any,
    tiny_text: Path,
    tiny_tokens: Tensor,
    masking_tokenizer: Any,
    tmp_path: Path,
) -> None:
    """`eval --against` and `verify --text`: of what both find in the place of every token, given all others."""
    models, paths = [bert, build_dense("bert", seed=1)], [tmp_path / "one", tmp_path / "other"]
    for model, path in zip(models, paths, strict=True):
        save_model(model, path)
        masking_tokenizer.save_pretrained(path)
    windows, end = tiny_tokens[:22].view(2, 11), masking_tokenizer.cls_token_id
    logs = []
    for model in models:
        rows = []
        for window in windows.tolist():
            for place in range(len(window)):
                ids = [end, *window, end]
                ids[place + 1] = masking_tokenizer.mask_token_id
                with torch.no_grad():
                    rows.append(model(torch.tensor([ids])).logits[0, place + 1])
        logs.append(torch.stack(rows).double().log_softmax(-1))
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
    same = (logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean().item()
    few = ("--sequence-length", 11, "--windows", 2, "--json")
    found = run_cli("eval", paths[1], "--data", tiny_text, "--against", paths[0], *few).json["against"]
    assert (found["kl"], found["agreement"]) == (pytest.approx(kl, rel=1e-4), same)
    told = run_cli("verify", paths[0], "--against", paths[0], "--text", tiny_text, "--max-kl", 0, *few).json["likeness"]
    assert (told["kl"], told["agreement"], told["layer_error"]) == (0, 1, {"0": 0, "1": 0, "2": 0})


def test_the_head_of_a_task_is_told(run_cli: Any, save_model: Any, bert: Any, tiny_text: Path, masking_tokenizer: Any,
                                    tmp_path: Path) -> None:  # fmt: skip
    torch.manual_seed(0)
    save_model(BertForSequenceClassification(bert.config), tmp_path / "head")
    masking_tokenizer.save_pretrained(tmp_path / "head")
    moefy = ("moefy", tmp_path / "head", tmp_path / "out", "--calibration", tiny_text, "--dry-run")
    for words in (("eval", tmp_path / "head", "--data", tiny_text), moefy):
        refused = run_cli(*words)
        assert refused.code == 3
        assert "is a BertForSequenceClassification: it has the head of a task" in refused.stderr
