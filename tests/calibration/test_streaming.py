"""A model of which one layer is in memory at a time, against the whole model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES
from derived_families import DERIVED
from families import COMMON, build
from safetensors.torch import load_file, save_file
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from upcycled import open_dense, save_dense, upcycled, write_upcycled

from moetool.architectures import MoEShape
from moetool.architectures.dense import find_dense_architecture
from moetool.architectures.derived import derive
from moetool.calibration.disk_experts import DiskExperts
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.format.families import architecture_of
from moetool.format.layout import LayerLayout
from moetool.quiet import quiet
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.upcycle.experts import PartlyRedrawn

SHAPE = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
WINDOWS, LENGTH = 5, 24
CPU = torch.device("cpu")


def stream(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> StreamedModel:
    checkpoint = Checkpoint.open(path)
    return StreamedModel(checkpoint, architecture_of(checkpoint.config), dtype, CPU, **options)


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


@pytest.fixture(scope="module")
def longcat(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose router also chooses experts that give back what they are given."""
    return save_model(build("longcat_flash"), tmp_path_factory.mktemp("longcat") / "model")


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


@pytest.mark.parametrize("kind", ["tiny_mixtral", "tiny_mixtral_sharded", "tied", "longcat"])
def test_logits_are_those_of_the_whole_model(
    kind: str, windows: Tensor, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    with torch.no_grad():
        expected = whole(path)(input_ids=windows).logits
    exact(logits(swept(stream(path), windows, tmp_path)), expected)
    exact(through(stream(path, experts_on_disk=True), windows), expected)


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


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("kind", ["tiny_mixtral", "tied", "longcat"])
def test_the_reverse_sweep_is_exact(
    kind: str, at_once: int | None, windows: Tensor, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    losses, expected = gradients(whole(path), windows)
    sweep = swept(stream(path, experts_at_once=at_once), windows, tmp_path)
    assert sweep.head() == pytest.approx(float(losses.mean()), rel=1e-6)
    for index in reversed(range(3)):
        with sweep.model.layer(index) as layer:
            sweep.backward(index, layer)
    found = sweep.gradient(0).read(0, WINDOWS) / sweep.loss_scale
    for mine, theirs in zip(found, expected, strict=True):
        exact(mine, theirs, 1e-5)


def meta(modules: Any) -> set[str]:
    return {parameter.device.type for module in modules for parameter in module.parameters()}


def test_one_layer_at_a_time(tiny_mixtral: Path) -> None:
    model = stream(tiny_mixtral)
    layers: nn.ModuleList = model.layers
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
    assert meta(model.layers) == {"meta"}


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
    synthesize: Callable[[Path], dict[str, Tensor]],
    windows: Tensor,
    tmp_path: Path,
) -> None:
    compressed = make_compressed(tiny_mixtral, tmp_path / "compressed", LAYOUTS)
    shutil.copytree(tiny_mixtral, tmp_path / "dense")
    save_file(synthesize(compressed), tmp_path / "dense" / "model.safetensors", {"format": "pt"})
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
        ("model.layers.1.self_attn.q_proj.weight", r"no tensor model\.layers\.1\.self_attn\.q_proj\.weight, .* \(1 "),
        ("model.norm.weight", r"no tensor model\.norm\.weight"),
        ("model.embed_tokens.weight", r"no tensor model\.embed_tokens\.weight"),
        ("lm_head.weight", r"no tensor lm_head\.weight"),
        ("model.layers.2.block_sparse_moe.gate.weight", r"no tensor .*block_sparse_moe\.gate\.weight"),
        ("model.layers.2.block_sparse_moe.experts.3.w2.weight", r"no tensor .*experts\.3\.w2\.weight"),
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
    told = r"q_proj\.weight of .* has shape \[32, 31\], config\.json promises \[32, 32\]"
    with pytest.raises(InvalidInputError, match=told):  # before any layer is read: a sweep takes hours
        stream(path)
    path = changed(tiny_mixtral, tmp_path / "b", lambda stored: stored.update({"model.norm.weight": torch.zeros(9)}))
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight of .* has shape \[9\]"):
        stream(path)


def test_tensors_that_a_layer_has_no_place_for_are_refused(tiny_mixtral: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    path = changed(tiny_mixtral, tmp_path / "model", lambda stored: stored.update({name: torch.zeros(32)}))
    with pytest.raises(InvalidInputError, match=re.escape(name)):
        stream(path)


def test_strangers_outside_the_layers_are_ignored(tiny_mixtral: Path, windows: Tensor, tmp_path: Path) -> None:
    path = changed(tiny_mixtral, tmp_path / "model", lambda stored: stored.update({"extra.head": torch.zeros(32)}))
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


# Dense models.


def stream_dense(path: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    checkpoint = Checkpoint.open(path)
    architecture = find_dense_architecture({**checkpoint.config, "quantization_config": None})
    return StreamedModel(checkpoint, architecture, dtype, CPU)


def through(model: StreamedModel, tokens: Tensor) -> Tensor:
    """Logits without a sweep: embed, every layer, head."""
    with torch.no_grad():
        hidden = model.embed(tokens)
        for index in range(model.layer_count):
            with model.layer(index) as layer:
                hidden = model.run_layer(index, layer, hidden)
        return model.head(tokens, hidden)


@pytest.mark.parametrize("family", sampled(DENSE_FAMILIES, DENSE_STRUCTURES))
def test_dense_families_give_the_logits_of_the_whole_model(family: str, windows: Tensor, tmp_path: Path) -> None:
    path = save_dense(tmp_path / "dense", family)
    with torch.no_grad():
        expected = whole(path)(input_ids=windows, use_cache=False).logits
    model = stream_dense(path)
    assert model.experts is None
    assert (model.layer_count, model.hidden_size) == (3, 32)
    exact(through(model, windows), expected)
    assert meta(model.layers) == {"meta"}


@pytest.mark.parametrize("family", ["gemma", "phi3", "gpt_neox"])
def test_dense_bf16_is_computed_in_fp32(family: str, windows: Tensor, tmp_path: Path) -> None:
    path = save_dense(tmp_path / "dense", family, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = whole(path)(input_ids=windows, use_cache=False).logits
    exact(through(stream_dense(path), windows), expected)


def test_a_missing_tensor_of_a_dense_model_is_named(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", "phi")
    name = "model.layers.1.mlp.fc1.bias"
    path = changed(source, tmp_path / "model", lambda stored: stored.pop(name))
    with pytest.raises(InvalidInputError, match=r"no tensor model\.layers\.1\.mlp\.fc1\.bias, .* \(1 missing"):
        stream_dense(path)


@pytest.mark.parametrize("family", ["phi", "gemma2", "llama-mlp-bias"])
def test_custom_moe_models_give_the_logits_of_the_whole_model(family: str, windows: Tensor, tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", family))
    different = PartlyRedrawn(dense, 0.5, seed=0)
    path = write_upcycled(tmp_path / "made", upcycled(dense, "moetool", experts=different, shared="half", layers=(1,)))
    with torch.no_grad():
        expected = whole(path)(input_ids=windows, use_cache=False).logits
    found = through(stream_dense(path), windows)
    exact(found, expected)
    assert (found - through(stream_dense(tmp_path / "dense"), windows)).norm() > 0.01 * expected.norm()


# Experts that stay on disk.


def stream_from_disk(path: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    checkpoint = Checkpoint.open(path)
    return StreamedModel(checkpoint, architecture_of(checkpoint.config), dtype, CPU, experts_on_disk=True)


@pytest.mark.parametrize("target", ["mixtral", "granitemoe", "granitemoeshared", "qwen2_moe", "qwen3_moe", "flex_olmo"])
def test_experts_on_disk_are_those_in_memory(target: str, windows: Tensor, tmp_path: Path) -> None:
    family = {"qwen3_moe": "qwen3", "flex_olmo": "olmo2"}.get(target, "llama")
    dense = open_dense(save_dense(tmp_path / "dense", family))
    shared = "half" if target == "granitemoeshared" else "none"
    made = upcycled(dense, target, experts=PartlyRedrawn(dense, 0.5, seed=0), shared=shared)
    path = write_upcycled(tmp_path / "made", made)
    with torch.no_grad():
        expected = whole(path)(input_ids=windows, use_cache=False).logits
    exact(through(stream_from_disk(path), windows), expected)
    exact(through(stream(path), windows), expected)


def test_experts_on_disk_are_never_in_memory_together(tiny_mixtral: Path) -> None:
    model = stream_from_disk(tiny_mixtral)
    experts = model.layers[1].mlp.experts
    with model.layer(1) as layer:
        assert meta([experts]) == {"meta"}
        assert meta(child for child in layer.modules() if child is not experts and not list(child.children())) == {
            "cpu"
        }
        assert isinstance(experts.forward, DiskExperts)
    assert not isinstance(experts.forward, DiskExperts)
    with pytest.raises(ZeroDivisionError), model.layer(1):
        raise ZeroDivisionError
    assert not isinstance(experts.forward, DiskExperts)


def test_a_compressed_checkpoint_runs_from_disk_too(
    tiny_mixtral: Path, make_compressed: Callable[..., Path], windows: Tensor, tmp_path: Path
) -> None:
    compressed = make_compressed(tiny_mixtral, tmp_path / "compressed", LAYOUTS)
    exact(through(stream_from_disk(compressed), windows), through(stream(compressed), windows))


def test_disk_experts_count_tokens(tiny_mixtral: Path, make_mixtral: Any) -> None:
    """Against transformers' own experts, over several calls; an expert without tokens is not read."""
    checkpoint = Checkpoint.open(tiny_mixtral)
    reader = ExpertReader(checkpoint, architecture_of(checkpoint.config))
    native = make_mixtral().model.layers[1].mlp.experts
    disk = DiskExperts(native, reader, 1, torch.float32, CPU)
    asked: list[int] = []
    read = reader.dense
    reader.dense = lambda layer, expert, role: (asked.append(expert), read(layer, expert, role))[1]  # type: ignore
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[0, 3], [3, 0], [0, 1], [1, 0]])
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.125, 0.5]])
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(disk(rows, chosen, weights), native(rows, chosen, weights), rtol=1e-5, atol=1e-6)
    assert disk.tokens.tolist() == [8, 4, 0, 4]
    assert set(asked) == {0, 1, 3}


def test_layers_that_look_back_over_many_layers_are_refused(tmp_path: Path) -> None:
    """Inkling 2's attend to what those before them were given: nothing in a layer's result says so."""
    config = {**COMMON, **DERIVED["inkling_text"], "unpadded_vocab_size": 288, "n_layers_per_attn_res_block": 1}
    with quiet():
        build("inkling2_text", **config).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot be compressed: its layers attend"):
        architecture_of(checkpoint.config)
    model = StreamedModel(checkpoint, derive(checkpoint.config), torch.float32, CPU)
    with pytest.raises(InvalidInputError, match="are given what layers before the last have made"):
        model.embed(torch.zeros(1, 4, dtype=torch.long))
