"""Codes of attention, embeddings and head that were chosen on a text lose less on it than the nearest ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_whole, tensors_of
from sampling import sampled
from torch import Tensor, nn
from torch.nn import functional as F

INCLUDED = ("--include", "attention,embeddings", "--group-size", 16)
NEAREST = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", *INCLUDED)


def metrics(path: Path, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Of the original's matrices, by module: second moments [in, in] of what errors in a row are multiplied by, one for
    each use of the matrix, as autograd says."""
    model, given, made = load_whole(path).float(), dict[str, Tensor](), dict[str, Tensor]()
    modules = {
        name: module
        for name, module in model.named_modules()
        if name.endswith(("_proj", "lm_head")) and isinstance(module, nn.Linear) and ".experts" not in name
    }
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, own, name=name: given.update({name: own[0].detach()}))
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda *own: made.update(rows=own[2].requires_grad_()))
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda *own: made.update(logits=own[2]))
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    by_row, by_logit = torch.autograd.grad(loss, (made["rows"], made["logits"]))
    found = {name: [own.flatten(0, -2).T @ own.flatten(0, -2)] for name, own in given.items()}
    rows = by_row.flatten(0, 1)
    found["model.embed_tokens"] = [rows.T @ rows]
    if head.weight is embed.weight:  # all rows together, as they count in the mean
        found["model.embed_tokens"].append(found.pop("lm_head")[0] * by_logit.square().sum(2).mean())
    return found


def lost(made: Path, source: Path, seen: dict[str, list[Tensor]]) -> dict[str, float]:
    """Squared errors at the outputs of the matrices that a result stores in 8 bits, by module."""
    before, after, found = tensors_of(source), tensors_of(made), dict[str, float]()
    for name, parts in seen.items():
        exact, scales = before[f"{name}.weight"].float(), after[f"{name}.moetool.scales"].float()
        codes = (after[f"{name}.moetool.codes"].view(exact.shape).float() - 127).view(*scales.shape, -1)
        error = (codes * scales.unsqueeze(2)).view_as(exact) - exact
        found[name] = sum(((error @ part) * error).sum().item() for part in parts)
    return found


@pytest.mark.parametrize(
    "method",
    sampled(
        ("hybrid --ratio 0.5", "d2moe --ratio 0.35", "quantize --bits 4", "auto --ratio 0.5"),
        ("hybrid --ratio 0.5", "quantize --bits 4"),
    ),
)
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_they_lose_less_on_the_text(
    method: str,
    model: str,
    compress: Any,
    tiny_mixtral_bf16: Path,
    tied: Path,
    tiny_tokens: Tensor,
) -> None:
    source = tied if model == "tied" else tiny_mixtral_bf16
    options = ("--method", *method.split(), *INCLUDED, "--mix", 0, "--compute-dtype", "float32")
    seen = metrics(source, tiny_tokens[:2048].view(-1, 64))
    nearest, chosen = (lost(compress(source, *own).path, source, seen) for own in (NEAREST, options))
    assert len(seen) == (13 if model == "tied" else 14)
    ratios = {name: chosen[name] / nearest[name] for name in seen}
    assert max(ratios.values()) < 1
    assert sum(ratios.values()) / len(ratios) < 0.8
    if model == "tied":
        assert ratios["model.embed_tokens"] < 0.86  # as an embedding alone .870, as a head alone more


def test_without_gradients_they_are_the_nearest(compress: Any, tiny_mixtral_bf16: Path) -> None:
    options = ("--method", "quantize", "--bits", 4, "--sensitivity", "none", *INCLUDED)
    chosen, nearest = (tensors_of(compress(tiny_mixtral_bf16, *own).path) for own in (options, NEAREST))
    names = [name for name in nearest if ".moetool." in name and ".experts." not in name]
    assert names
    assert all(chosen[name].equal(nearest[name]) for name in names)
