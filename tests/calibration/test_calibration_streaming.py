"""A model of which one layer is in memory at a time, against the whole model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moetool.architectures import MoEShape, find_architecture
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.integrations.quiet import quiet
from moetool.representations.dense import Dense
from moetool.representations.layout import LayerLayout
from moetool.representations.low_rank import LowRank

SHAPE = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
WINDOWS, LENGTH = 5, 24
CPU = torch.device("cpu")


def stream(path: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    checkpoint = Checkpoint.open(path)
    return StreamedModel(checkpoint, find_architecture(checkpoint.config), dtype, CPU)


def whole(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return model.eval()


@pytest.fixture
def windows(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)


@pytest.fixture(scope="module")
def tied(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(make_mixtral(seed=3, tie_word_embeddings=True), tmp_path_factory.mktemp("tied") / "model")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    return path


def swept(model: StreamedModel, windows: Tensor, directory: Path, batch: int = 2) -> Sweep:
    """A forward sweep, every boundary on disk; 5 windows go in batches of 2, 2 and 1."""
    directory.mkdir(exist_ok=True)
    sweep = Sweep(model, windows, directory)
    sweep.batch_size = batch
    sweep.embed()
    for index in range(model.layer_count):
        with model.layer(index) as layer:
            sweep.forward(index, layer)
    return sweep


def logits(sweep: Sweep) -> Tensor:
    last = sweep.hidden(sweep.model.layer_count).read(0, sweep.count)
    with torch.no_grad():
        return sweep.model.head(sweep.windows, last)


def exact(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("kind", ["plain", "sharded", "tied"])
def test_logits_are_those_of_the_whole_model(
    kind: str, tiny_mixtral: Path, tiny_mixtral_sharded: Path, tied: Path, windows: Tensor, tmp_path: Path
) -> None:
    path = {"plain": tiny_mixtral, "sharded": tiny_mixtral_sharded, "tied": tied}[kind]
    with torch.no_grad():
        expected = whole(path)(input_ids=windows).logits
    exact(logits(swept(stream(path), windows, tmp_path)), expected)


def test_every_boundary_is_the_whole_models(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    sweep = swept(stream(tiny_mixtral), windows, tmp_path)
    with torch.no_grad():
        outputs = whole(tiny_mixtral)(input_ids=windows, output_hidden_states=True).hidden_states
    for boundary in range(3):  # the last of transformers' hidden states has been normalised
        exact(sweep.hidden(boundary).read(0, WINDOWS), outputs[boundary])


def test_stored_bf16_is_computed_in_fp32(tiny_mixtral_bf16: Path, windows: Tensor, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = whole(tiny_mixtral_bf16)(input_ids=windows).logits
    exact(logits(swept(stream(tiny_mixtral_bf16), windows, tmp_path)), expected)


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_batches_do_not_matter(tiny_mixtral: Path, windows: Tensor, tmp_path: Path, batch: int) -> None:
    expected = logits(swept(stream(tiny_mixtral), windows, tmp_path / "a", batch=2))
    exact(logits(swept(stream(tiny_mixtral), windows, tmp_path / "b", batch=batch)), expected)


def test_a_resumed_sweep_is_the_same_sweep(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    """A second process that finds the boundaries on disk has never embedded anything itself."""
    swept(stream(tiny_mixtral), windows, tmp_path)
    before = Sweep(stream(tiny_mixtral), windows, tmp_path).hidden(3).read(0, WINDOWS)
    again = Sweep(stream(tiny_mixtral), windows, tmp_path)
    again.batch_size = 2
    with again.model.layer(2) as layer:
        again.forward(2, layer)
    assert again.hidden(3).read(0, WINDOWS).equal(before)


def gradients(model: Any, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Each window's own mean next-token loss by transformers' own loss, and its gradient at the embeddings."""
    losses, rows = [], []
    for window in windows:
        embedded = model.get_input_embeddings()(window[None]).detach().requires_grad_(True)
        loss = model(inputs_embeds=embedded, labels=window[None]).loss
        rows.append(torch.autograd.grad(loss, embedded)[0])
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat(rows)


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_the_reverse_sweep_is_exact(kind: str, tiny_mixtral: Path, tied: Path, windows: Tensor, tmp_path: Path) -> None:
    path = {"plain": tiny_mixtral, "tied": tied}[kind]
    losses, expected = gradients(whole(path), windows)
    sweep = swept(stream(path), windows, tmp_path)
    assert sweep.head() == pytest.approx(float(losses.mean()), rel=1e-6)
    for index in reversed(range(3)):
        with sweep.model.layer(index) as layer:
            sweep.backward(index, layer)
    found = sweep.gradient(0).read(0, WINDOWS)
    for mine, theirs in zip(found, expected, strict=True):
        exact(mine, theirs, 1e-5)


def meta(modules: Any) -> set[str]:
    return {parameter.device.type for module in modules for parameter in module.parameters()}


def test_one_layer_at_a_time(tiny_mixtral: Path) -> None:
    model = stream(tiny_mixtral)
    layers: nn.ModuleList = model.decoder.layers
    assert meta(layers) == {"meta"}
    for index in (0, 2, 1):
        with model.layer(index) as layer:
            assert layer is layers[index]
            assert meta([layer]) == {"cpu"}
            assert meta(other for other in layers if other is not layer) == {"meta"}
        assert meta(layers) == {"meta"}
    rest = [parameter for name, parameter in model.model.named_parameters() if ".layers." not in name]
    assert {parameter.device.type for parameter in rest} == {"cpu"}


def test_a_layer_is_emptied_when_its_work_fails(tiny_mixtral: Path) -> None:
    model = stream(tiny_mixtral)
    with pytest.raises(ZeroDivisionError), model.layer(1):
        raise ZeroDivisionError
    assert meta(model.decoder.layers) == {"meta"}


def test_a_layer_can_be_loaded_again(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    model = stream(tiny_mixtral)
    first = logits(swept(model, windows, tmp_path / "a"))
    assert logits(swept(model, windows, tmp_path / "b")).equal(first)


def test_a_loaded_layer_has_the_checkpoints_weights(tiny_mixtral_bf16: Path) -> None:
    expected = whole(tiny_mixtral_bf16).state_dict()
    model = stream(tiny_mixtral_bf16)
    for index in range(3):
        with model.layer(index) as layer:
            found = layer.state_dict()
            prefix = f"model.layers.{index}."
            assert {prefix + name for name in found} == {name for name in expected if name.startswith(prefix)}
            for name, tensor in found.items():
                assert tensor.equal(expected[prefix + name]), name
                assert tensor.dtype == torch.float32
                assert not tensor.requires_grad


MIXED = (LowRank(5), Dense(), LowRank(0), LowRank(2))
LAYOUTS = {
    0: LayerLayout(SHAPE, {"gate": MIXED, "up": MIXED[::-1], "down": MIXED}, 40),
    2: LayerLayout(SHAPE, {"gate": (LowRank(3),) * 4, "up": MIXED, "down": None}, 48),
}


def test_a_compressed_checkpoint_streams_as_what_it_stands_for(
    tiny_mixtral: Path,
    make_compressed: Callable[..., Path],
    synthesise: Callable[[Path], dict[str, Tensor]],
    windows: Tensor,
    tmp_path: Path,
) -> None:
    compressed = make_compressed(tiny_mixtral, tmp_path / "compressed", LAYOUTS)
    shutil.copytree(tiny_mixtral, tmp_path / "dense")
    save_file(synthesise(compressed), tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    dense, model = whole(tmp_path / "dense"), stream(compressed)
    for index in range(3):
        with model.layer(index) as layer:
            for name in ("gate_up_proj", "down_proj"):
                found, expected = (getattr(of.mlp.experts, name) for of in (layer, dense.model.layers[index]))
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        exact(logits(swept(model, windows, tmp_path / "work")), dense(input_ids=windows).logits)


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    stored = load_file(target / "model.safetensors")
    change(stored)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.layers.1.self_attn.q_proj.weight", r"no tensor for model\.layers\.1\.self_attn\.q_proj\.weight \(1 "),
        ("model.norm.weight", r"no tensor for model\.norm\.weight"),
        ("model.embed_tokens.weight", r"no tensor for model\.embed_tokens\.weight"),
        ("lm_head.weight", r"no tensor for lm_head\.weight"),
        ("model.layers.2.block_sparse_moe.gate.weight", r"block_sparse_moe\.gate\.weight is missing"),
        ("model.layers.2.block_sparse_moe.experts.3.w2.weight", r"experts\.3\.w2\.weight is missing"),
    ],
)
def test_a_missing_tensor_is_named_before_anything_is_computed(
    tiny_mixtral: Path, tmp_path: Path, name: str, told: str
) -> None:
    path = changed(tiny_mixtral, tmp_path / "model", lambda stored: stored.pop(name))
    with pytest.raises(InvalidInputError, match=told):
        stream(path)


def test_a_wrong_shape_is_named(tiny_mixtral: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    path = changed(tiny_mixtral, tmp_path / "a", lambda stored: stored.update({name: torch.zeros(32, 31)}))
    told = r"q_proj\.weight has shape \[32, 31\], config\.json promises \[32, 32\]"
    with pytest.raises(InvalidInputError, match=told):  # before any layer is read: a sweep takes hours
        stream(path)
    path = changed(tiny_mixtral, tmp_path / "b", lambda stored: stored.update({"model.norm.weight": torch.zeros(9)}))
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight has shape \[9\]"):
        stream(path)


def test_strangers_outside_the_blocks_are_ignored(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    path = changed(tiny_mixtral, tmp_path / "model", lambda stored: stored.update({"extra.head": torch.zeros(3)}))
    expected = logits(swept(stream(tiny_mixtral), windows, tmp_path / "a"))
    assert logits(swept(stream(path), windows, tmp_path / "b")).equal(expected)


def test_damaged_weights_are_noticed_in_their_layer(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    path = changed(tiny_mixtral, tmp_path / "model", lambda stored: stored[name].fill_(torch.nan))
    with pytest.raises(InvalidInputError, match="Layer 1 gives NaN or infinite values"):
        swept(stream(path), windows, tmp_path / "work")
    assert not (tmp_path / "work" / "hidden-00002.bin").exists()


def test_the_rope_is_the_configs(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    """Rotary frequencies are in no file; they have to be rebuilt from the config, not from a default."""
    shutil.copytree(tiny_mixtral, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config.get("rope_parameters", config)["rope_theta"] = 123.0
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        expected = whole(tmp_path / "model")(input_ids=windows).logits
    found = logits(swept(stream(tmp_path / "model"), windows, tmp_path / "a"))
    exact(found, expected)
    assert not found.allclose(logits(swept(stream(tiny_mixtral), windows, tmp_path / "b")), rtol=1e-3)


def test_ticks_are_batches(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    ticks: list[int] = []
    sweep = Sweep(stream(tiny_mixtral), windows, tmp_path, tick=lambda: ticks.append(1))
    sweep.batch_size = 2
    sweep.embed()
    assert len(ticks) == sweep.batch_count == 3
