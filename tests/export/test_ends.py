"""What errors in embeddings and head cost, against gradients that autograd takes of the whole model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import load
from families import build
from torch import Tensor
from torch.nn import functional as F

from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.calibration.table_moments import Weighed
from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing import ends
from moetool.export.choosing.ends import Ends, table_losses
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.blocks import BLOCK_TYPES
from moetool.job.job import Source

CPU = torch.device("cpu")
KINDS = [BLOCK_TYPES[name] for name in ("q4_k", "q8_0")]


def table(name: str, rows: Tensor) -> GgufTensor:
    """In two parts."""
    return GgufTensor(name, tuple(rows.shape), "q8_0", lambda: iter(rows.split(len(rows) - 5)))


@pytest.mark.parametrize(("family", "more"), [("mixtral", {}), ("granitemoe", {"embedding_multiplier": 3.0})])
def test_they_are_what_gradients_say(family: str, more: Any, tmp_path: Path) -> None:
    """Also where a family multiplies embeddings."""
    build(family, **more).save_pretrained(tmp_path / "model")
    source = Source.open(tmp_path / "model")
    model = StreamedModel(source.checkpoint, source.architecture, torch.float32, CPU)
    tokens = torch.randint(model.config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))
    sweep = Sweep(model, tokens, tmp_path)
    calibrated: Any = SimpleNamespace(gradient_sweep=sweep, job=SimpleNamespace(device=CPU, work=tmp_path))
    names, written = ("token_embd.weight", "output.weight"), GgufSource.of(source.checkpoint)
    vars(written)["is_tied"] = False
    found = Ends(calibrated, written)
    sweep.embed()
    for index in range(model.layer_count):
        with model.layer(index) as layer:
            sweep.forward(index, layer)
    assert found.see_head() > 0
    for index in reversed(range(model.layer_count)):
        with model.layer(index) as layer:
            sweep.backward(index, layer)

    whole, seen = load(tmp_path / "model"), dict[str, Tensor]()
    whole.get_input_embeddings().register_forward_hook(lambda *own: seen.update(embedded=own[2].requires_grad_()))
    whole.get_output_embeddings().register_forward_hook(lambda *own: seen.update(inputs=own[1][0], head=own[2]))
    logits = whole(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * len(tokens) * sweep.loss_scale
    by_row, by_output = torch.autograd.grad(loss, (seen["embedded"], seen["head"]))
    [embedded], [head] = found.weighed[names[0]], found.weighed[names[1]]
    rows = by_row.flatten(0, 1)
    torch.testing.assert_close(embedded.metric, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-6)
    assert embedded.rows.tolist() == torch.bincount(tokens.flatten(), minlength=len(embedded.rows)).tolist()
    given = seen["inputs"].flatten(0, 1)
    torch.testing.assert_close(head.metric, given.T @ given, rtol=1e-3, atol=1e-4)
    expected = by_output.flatten(0, 1).double().square().mean(0)
    torch.testing.assert_close(head.rows, expected, rtol=1e-3, atol=1e-9)
    # A file that holds its embeddings three times as large has errors that count a ninth.
    scaled = replace(written, family=replace(written.family, scaled={names[0]: lambda _: 3.0}))
    vars(scaled)["is_tied"] = False
    [thrice] = Ends(calibrated, scaled).weighed[names[0]]
    torch.testing.assert_close(9 * thrice.rows, embedded.rows)
    # Without a head of its own the table is both.
    tied = replace(written)
    vars(tied)["is_tied"] = True
    assert len(Ends(calibrated, tied).weighed[names[0]]) == 2


@pytest.fixture
def weighed() -> list[Weighed]:
    draw, found = torch.Generator().manual_seed(0), []
    for _ in range(2):
        given = torch.randn(900, 256, generator=draw) @ (torch.eye(256) + 0.05 * torch.randn(256, 256, generator=draw))
        found.append(Weighed(given.T @ given, torch.rand(300, generator=draw).double()))
    return found


@pytest.mark.parametrize("tried", [300, 100])
def test_rows_that_are_tried_say_what_codes_of_all_lose(
    tried: int, weighed: list[Weighed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "TRIED_TOKENS", tried)
    rows = torch.randn(300, 256, generator=torch.Generator().manual_seed(1))
    inputs = PreparedGram.of(weighed[0].metric + weighed[1].metric)
    assert inputs is not None
    found, expected = table_losses(table("token_embd.weight", rows), KINDS, weighed, inputs), []
    for kind in KINDS:
        errors = rows - block_codes(rows, kind, inputs).decoded().T
        expected.append(sum((((errors @ own.metric) * errors).sum(1).double() @ own.rows).item() for own in weighed))
    assert found == pytest.approx(expected, rel=1e-3 if tried == 300 else 0.1)
    assert found[0] > 20 * found[1]


def test_without_any_gradient_every_type_is_as_good(weighed: list[Weighed]) -> None:
    assert table_losses(table("token_embd.weight", torch.ones(300, 256)), KINDS, weighed, None) == [0.0, 0.0]
