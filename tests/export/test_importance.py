"""What matrices are given, and their gradients, by expert and by row."""

from pathlib import Path

import pytest
import torch
from gguf_models import gguf_model
from torch import nn

from moetool.calibration.held_experts import ExpertRun
from moetool.calibration.row_moments import ProjectionMetric, save_row_moments
from moetool.checkpoint.reader import Checkpoint
from moetool.export.choosing.moments import LayerMoments
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.words import interleaved

pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")

CPU = torch.device("cpu")


class Attention(nn.Module):
    """The projections of a layer of the tiny Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k_proj, self.v_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)


class Layer(nn.Module):
    """The part of that layer that is not its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()


@pytest.fixture
def source(tiny_mixtral: Path) -> GgufSource:
    return GgufSource.of(Checkpoint.open(tiny_mixtral))


def test_gradients_are_those_of_an_experts_own_outputs(source: GgufSource) -> None:
    draw = torch.Generator().manual_seed(0)
    moments = LayerMoments(source, 1, Layer(), CPU)
    for expert, tokens in ((2, 5), (0, 3), (2, 4)):
        inputs = torch.randn(tokens, 32, generator=draw)
        gate_up = torch.randn(tokens, 96, generator=draw, requires_grad=True)
        activation = torch.randn(tokens, 48, generator=draw)
        output = torch.randn(tokens, 32, generator=draw, requires_grad=True)
        moments.observe(expert, torch.zeros(tokens), inputs, ExpertRun(gate_up, activation, output, output, torch.relu))
        (torch.cat([torch.ones(48), 3 * torch.ones(48)]) * gate_up).sum().backward()
        (expert * output).sum().backward()
    gate, up, down = (moments.by_name[f"blk.1.ffn_{role}_exps.weight"] for role in ("gate", "up", "down"))
    assert gate.counts.tolist() == up.counts.tolist() == down.counts.tolist() == [3, 0, 9, 0]
    assert gate.sensitivity[:, 0].tolist() == [1, 0, 1, 0]
    assert up.sensitivity[:, 47].tolist() == [9, 0, 9, 0]
    assert down.sensitivity[:, 31].tolist() == [0, 0, 4, 0]
    assert torch.equal(gate.given, up.given)
    assert gate.given[[1, 3]].count_nonzero() == down.given[[1, 3]].count_nonzero() == 0
    assert moments.sensitivity("blk.1.ffn_down_exps.weight").shape == (4 * 32,)


def test_projections_are_watched_and_rows_turned_as_in_the_file(source: GgufSource) -> None:
    layer = Layer()
    moments, inputs = LayerMoments(source, 1, layer, CPU), torch.randn(2, 7, 32)
    rows = torch.arange(32.0)
    with moments.watching():
        (layer.self_attn.q_proj(inputs) * rows).sum().backward()
    layer.self_attn.q_proj(inputs)  # not watched any more
    found = moments.by_name["blk.1.attn_q.weight"]
    assert found.counts.tolist() == [14]
    torch.testing.assert_close(found.given[0], inputs.double().square().sum((0, 1)))
    own = moments.sensitivity("blk.1.attn_q.weight")
    torch.testing.assert_close(own, interleaved(rows.double().square(), 4))
    assert not torch.equal(own, rows.double().square())
    assert moments.between_rows == {}
    assert not moments.by_name["blk.1.attn_v.weight"].counts.any()


@pytest.mark.parametrize(
    ("family", "path", "names"),
    [
        ("qwen3_next", "linear_attn.in_proj_qkvz", ("attn_qkv.weight", "attn_gate.weight")),
        ("qwen3_5_moe_text", "linear_attn.in_proj_qkv", ("attn_qkv.weight",)),
    ],
)
def test_rows_that_lie_otherwise_in_the_file_keep_their_sensitivity(
    tmp_path: Path, family: str, path: str, names: tuple[str, ...]
) -> None:
    """A row of the file has the gradients of the output that the same numbers compute."""
    model = gguf_model(family)
    model.save_pretrained(tmp_path / "model")
    source = GgufSource.of(Checkpoint.open(tmp_path / "model"))
    layer = model.model.layers[0]
    projection = layer.get_submodule(path)
    moments, inputs = LayerMoments(source, 0, layer, CPU), torch.randn(2, 7, 32)
    weight = projection.weight.detach()
    with moments.watching():  # the gradient of an output is the first number of its row
        (projection(inputs) * weight[:, 0]).sum().backward()
    tensors = {tensor.name: tensor for tensor in source.tensors("f32", "f32")}
    for name in names:
        rows = torch.cat(list(tensors[f"blk.0.{name}"].parts()))
        torch.testing.assert_close(moments.sensitivity(f"blk.0.{name}").float(), rows[:, 0].square())


@pytest.mark.parametrize(("path", "name"), [("mamba.in_proj", "ssm_in.weight"), ("self_attn.k_proj", "attn_k.weight")])
def test_rows_that_a_file_multiplies_lose_what_the_models_own_lose(tmp_path: Path, path: str, name: str) -> None:
    """An error that is as large in the file's rows is so much smaller in what these rows stand for."""
    model = gguf_model("falcon_h1")
    model.save_pretrained(tmp_path / "model")
    source = GgufSource.of(Checkpoint.open(tmp_path / "model"))
    layer, own = model.model.layers[0], f"blk.0.{name}"
    projection = layer.get_submodule(path)
    inputs = torch.randn(2, 7, 32)
    moments = LayerMoments(source, 0, layer, CPU)
    with moments.watching():
        projection(inputs).square().sum().backward()
    tensors = {tensor.name: tensor for tensor in source.tensors("f32", "f32")}
    rows, weight = torch.cat(list(tensors[own].parts())), projection.weight.detach()
    assert not torch.equal(rows, weight)
    lost = projection(inputs).mul(2).square().mean((0, 1)) * weight.square().sum(1)
    torch.testing.assert_close(moments.sensitivity(own).float() * rows.square().sum(1), lost)


@pytest.mark.parametrize(("path", "name"), [("self_attn.q_proj", "attn_q.weight"), ("mamba.in_proj", "ssm_in.weight")])
def test_gradients_at_two_rows_of_the_file_are_multiplied(tmp_path: Path, path: str, name: str) -> None:
    """An error in the file's rows, undone in the model's own, has the same product with the gradients there."""
    model = gguf_model("falcon_h1" if "mamba" in path else "smollm3")
    model.save_pretrained(tmp_path / "model")
    source = GgufSource.of(Checkpoint.open(tmp_path / "model"))
    layer, own = model.model.layers[0], f"blk.0.{name}"
    projection = layer.get_submodule(path)
    moments, inputs = LayerMoments(source, 0, layer, CPU, length=7), torch.randn(1, 7, 32).expand(2, 7, 32)
    with moments.watching():
        (projection(inputs) ** 3).sum().backward()
    gradients = (3 * projection(inputs).detach() ** 2).flatten(0, 1)
    errors = torch.randn_like(projection.weight)
    in_file = source.turned(own, source.family.multiplied(own, source.config, errors))
    assert not torch.equal(in_file, errors)
    save_row_moments(tmp_path / "rows.safetensors", moments.between_rows)
    metric = ProjectionMetric.read(tmp_path / "rows.safetensors", own, CPU)
    found = metric.moment(torch.arange(len(in_file)))
    assert ((found @ in_file) * in_file).sum() == pytest.approx((gradients @ errors).square().sum().item(), rel=1e-3)
