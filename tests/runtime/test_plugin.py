"""A moetool checkpoint in transformers: loads, computes, trains and saves like any other, or fails and says why."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.base import HfQuantizer

from moetool.architectures import MoEShape
from moetool.errors import InvalidInputError
from moetool.format.layout import LayerLayout
from moetool.quiet import quiet
from moetool.representations.dense import Dense
from moetool.representations.low_rank import LowRank
from moetool.runtime import autoload
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.plugin import MoetoolQuantizer

ROOT = Path(__file__).parents[2]
SHAPE = MoEShape(experts=4, top_k=2, hidden=32, intermediate=48)
MIXED = (LowRank(5), Dense(), LowRank(0), LowRank(2))
ROLES = ("gate", "up", "down")
# Layer 1 stays native.
LAYOUTS = {
    0: LayerLayout(SHAPE, {"gate": MIXED, "up": MIXED[::-1], "down": MIXED}, 40),
    2: LayerLayout(SHAPE, {"gate": (LowRank(3),) * 4, "up": MIXED, "down": None}, 48),
}
DYNAMIC = {1: LayerLayout(SHAPE, dict.fromkeys(ROLES, (LowRank(3),) * 4), 40, 7)}


def load(path: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    with quiet():
        return auto.from_pretrained(path, **options)


@pytest.fixture(scope="module")
def compressed(tiny_mixtral: Path, make_compressed: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_compressed(tiny_mixtral, tmp_path_factory.mktemp("plugin") / "compressed", LAYOUTS)


@pytest.fixture(scope="module")
def dense(compressed: Path, synthesize: Any, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An ordinary Mixtral with the experts that `compressed` stands for."""
    path = tmp_path_factory.mktemp("plugin") / "dense"
    shutil.copytree(tiny_mixtral, path)
    save_file(synthesize(compressed), path / "model.safetensors", {"format": "pt"})
    return load(path)


@pytest.fixture
def prompt(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[: 2 * 24].view(2, 24)


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_it_computes_what_it_stands_for(compressed: Path, dense: Any, prompt: Tensor) -> None:
    model = load(compressed)
    kinds = [type(layer.mlp.experts) is SharedBaseExperts for layer in model.model.layers]
    assert kinds == [True, False, True]
    torch.testing.assert_close(logits(model, prompt), logits(dense, prompt), rtol=1e-5, atol=1e-5)


def test_a_loader_that_does_not_name_the_model(
    compressed: Path, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.17 to 5.19 call it."""
    known, own = logits(load(compressed), prompt), MoetoolQuantizer.update_weight_conversions
    monkeypatch.setattr(HfQuantizer, "update_weight_conversions", lambda self, conversions: conversions)
    monkeypatch.setattr(
        MoetoolQuantizer, "update_weight_conversions", lambda self, conversions, *_: own(self, conversions)
    )
    assert torch.equal(logits(load(compressed), prompt), known)


def test_parameters_are_those_of_the_file(compressed: Path) -> None:
    model = load(compressed)
    stored = load_file(compressed / "model.safetensors")
    experts = model.model.layers[0].mlp.experts
    prefix = "model.layers.0.block_sparse_moe.experts."
    assert experts.moetool["3"]["gate"].u.equal(stored[f"{prefix}moetool.3.gate.u"])
    assert experts.gate_up_proj[0].equal(torch.cat([stored[f"{prefix}0.w1.weight"], stored[f"{prefix}0.w3.weight"]]))
    assert experts.down_proj[0].equal(stored[f"{prefix}0.w2.weight"])
    assert experts.base_channels.equal(stored[f"{prefix}base_channels"])
    weights = sum(tensor.numel() for name, tensor in stored.items() if "base_channels" not in name)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_maps(compressed: Path, prompt: Tensor, device_map: str) -> None:
    model = load(compressed, device_map=device_map)
    expected = logits(load(compressed), prompt)
    torch.testing.assert_close(logits(model, prompt.to(model.device)).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_offload_to_disk(compressed: Path, prompt: Tensor, tmp_path: Path) -> None:
    places = dict.fromkeys(["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    places |= {"model.layers.0": "disk", "model.layers.2": "disk"}
    model = load(compressed, device_map=places, offload_folder=str(tmp_path / "offload"))
    experts = model.model.layers[0].mlp.experts
    assert experts.moetool["3"]["gate"].u.device.type == "meta"
    # Kernels compute what is in memory, plain torch what is not.
    torch.testing.assert_close(logits(model, prompt), logits(load(compressed), prompt), rtol=1e-5, atol=1e-5)


def test_generate(compressed: Path, dense: Any, prompt: Tensor) -> None:
    def told(model: Any) -> Tensor:
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    found = told(load(compressed))
    assert found.shape == (2, 36)
    assert found.equal(told(dense))


def test_a_training_step_changes_the_loss(compressed: Path, prompt: Tensor) -> None:
    model = load(compressed).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = model(input_ids=prompt, labels=prompt).loss
    before.backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert "model.layers.0.mlp.experts.gate_up_proj" in touched
    assert "model.layers.0.mlp.experts.moetool.0.down.v" in touched
    optimizer.step()
    after = model(input_ids=prompt, labels=prompt).loss
    assert after.item() < before.item() - 1e-3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")  # renamed in newer transformers
def test_gradient_checkpointing(compressed: Path, prompt: Tensor) -> None:
    def gradient(model: Any) -> Tensor:
        model.train()(input_ids=prompt, labels=prompt).loss.backward()
        return model.model.layers[0].mlp.experts.moetool["0"]["gate"].u.grad

    checkpointed = load(compressed)
    checkpointed.gradient_checkpointing_enable()
    torch.testing.assert_close(gradient(checkpointed), gradient(load(compressed)), rtol=1e-5, atol=1e-7)


def test_saving_gives_back_the_same_checkpoint(compressed: Path, tmp_path: Path) -> None:
    with quiet():
        load(compressed).save_pretrained(tmp_path)
    before, after = load_file(compressed / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(after) == set(before)
    assert all(after[name].equal(tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items())
    entries = [json.loads((path / "config.json").read_text())["quantization_config"] for path in (compressed, tmp_path)]
    assert entries[1] == entries[0]


def test_what_was_trained_is_what_is_saved(compressed: Path, prompt: Tensor, tmp_path: Path) -> None:
    model = load(compressed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    with quiet():
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert logits(load(tmp_path), prompt).equal(logits(model, prompt))


def test_dynamic_pruning_survives(tiny_mixtral: Path, make_compressed: Any, prompt: Tensor, tmp_path: Path) -> None:
    path = make_compressed(tiny_mixtral, tmp_path / "dynamic", DYNAMIC)
    model = load(path)
    assert model.model.layers[1].mlp.experts.layout == DYNAMIC[1]
    with quiet():
        model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert logits(again, prompt).equal(logits(model, prompt))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]["layers"]["1"]["dynamic_channels"]
    (path / "config.json").write_text(json.dumps(config))
    assert not logits(load(path), prompt).allclose(logits(model, prompt))


def test_half_and_dtype(compressed: Path, prompt: Tensor) -> None:
    model = load(compressed)
    exact = logits(model, prompt)
    half = logits(model.half(), prompt)
    assert half.dtype == torch.float16
    assert model.model.layers[0].mlp.experts.base_channels.dtype == torch.int32
    assert (half.float() - exact).norm() / exact.norm() < 0.02
    narrow = load(compressed, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    assert (logits(narrow, prompt).float() - exact).norm() / exact.norm() < 0.1


def test_the_bare_decoder(compressed: Path, prompt: Tensor) -> None:
    decoder = load(compressed, AutoModel)
    with torch.no_grad():
        hidden = decoder(input_ids=prompt).last_hidden_state
        expected = load(compressed).model(input_ids=prompt).last_hidden_state
    assert type(decoder.layers[0].mlp.experts) is SharedBaseExperts
    assert hidden.equal(expected)


def test_it_counts_as_an_ordinary_model(compressed: Path) -> None:
    model = load(compressed)
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "hf_quantizer")
    assert model.config.quantization_config.quant_method == "moetool"


def test_native_checkpoints_are_left_alone(tiny_mixtral: Path) -> None:
    assert not any(isinstance(module, SharedBaseExperts) for module in load(tiny_mixtral).modules())


@pytest.fixture
def damaged(compressed: Path, tmp_path: Path) -> Callable[..., Path]:
    """`damaged(name, tensor)`: a copy of the checkpoint with one tensor replaced, or removed."""

    def make(name: str, tensor: Tensor | None = None) -> Path:
        path = tmp_path / "damaged"
        shutil.copytree(compressed, path)
        stored = load_file(path / "model.safetensors")
        full = f"model.layers.0.block_sparse_moe.experts.{name}"
        del stored[full]
        if tensor is not None:
            stored[full] = tensor
        save_file(stored, path / "model.safetensors", {"format": "pt"})
        return path

    return make


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("moetool.3.gate.u", "moetool.3.gate.u"),
        ("moetool.1.down.matrix", "moetool.1.down.matrix"),
        ("base_channels", "base_channels"),
        ("0.w2.weight", "down_proj"),
    ],
)
def test_a_missing_tensor_is_named(damaged: Callable[..., Path], name: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=rf"missing from the checkpoint.*layers\.0\.mlp\.experts\.{told}"):
        load(damaged(name))


def test_a_missing_half_of_a_base_is_noticed(damaged: Callable[..., Path]) -> None:
    """Gate and up are one tensor in memory: half of it must not do."""
    with pytest.raises(RuntimeError):
        load(damaged("0.w3.weight"))


def test_a_wrong_shape_is_noticed(damaged: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeError, match="mismatch"):
        load(damaged("moetool.3.gate.u", torch.zeros(48, 9)))


def patched(compressed: Path, tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "patched"
    shutil.copytree(compressed, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"].update(changes)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_newer_format_is_refused(compressed: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"format version 4; this moetool reads up to 3\. Upgrade moetool"):
        load(patched(compressed, tmp_path, format_version=4))


def test_an_unknown_representation_is_refused(compressed: Path, tmp_path: Path) -> None:
    layers = {"0": {"gate": ["splines:3"] * 4, "up": ["dense"] * 4, "down": None}}
    with pytest.raises(InvalidInputError, match="Unknown representation 'splines:3'"):
        load(patched(compressed, tmp_path, layers=layers))


def test_a_layer_that_is_not_there_is_refused(compressed: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="the layers of this model are 0 to 2"):
        load(patched(compressed, tmp_path, layers={"3": LAYOUTS[0].to_config()}))


# Import order matters in a fresh process only. Both processes run side by side while other tests go on.

MOETOOL_FIRST = """
import sys
import moetool
heavy = sorted({"torch", "transformers", "numpy", "scipy", "datasets"} & set(sys.modules))
assert not heavy, heavy
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.layers[0].mlp.experts).__name__)
"""

TRANSFORMERS_FIRST = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except RuntimeError as error:
    print("without moetool: RuntimeError")
    print("without moetool:", "moetool" in str(error), file=sys.stderr)
assert "moetool" not in sys.modules
import moetool
print("with moetool:", type(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.layers[0].mlp.experts).__name__)
"""

# transformers imports torch, and that moetool, while the part of transformers that moetool extends is half loaded.
MOETOOL_NEVER = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.layers[0].mlp.experts).__name__)
print(AutoConfig.for_model("deepseek").model_type)
"""


@pytest.fixture(scope="module", autouse=True)
def processes(compressed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    pipe = subprocess.PIPE
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    scripts = {
        "moetool first": (MOETOOL_FIRST, alone),
        "transformers first": (TRANSFORMERS_FIRST, alone),
        "moetool never": (MOETOOL_NEVER, os.environ | {"PYTHONPATH": installed(tmp_path_factory.mktemp("site"))}),
    }
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", code, str(compressed)], stdout=pipe, stderr=pipe, text=True, env=environment
        )
        for name, (code, environment) in scripts.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def installed(folder: Path) -> str:
    """A path on which moetool has the entry points of pyproject.toml, whatever is installed here has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = folder / "moetool_entry_points-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: moetool-entry-points\nVersion: 0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in points.items()))
    ]
    (described / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(ROOT), str(folder)])


def test_moetool_first_is_light_and_registers_later(processes: dict[str, subprocess.Popen[str]]) -> None:
    stdout, stderr = processes["moetool first"].communicate(timeout=120)
    assert processes["moetool first"].returncode == 0, stderr
    assert stdout.strip() == "SharedBaseExperts"


def test_without_moetool_loading_fails_and_names_it_and_with_it_all_is_well(
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    stdout, stderr = processes["transformers first"].communicate(timeout=120)
    assert processes["transformers first"].returncode == 0, stderr
    assert stdout.splitlines() == ["without moetool: RuntimeError", "with moetool: SharedBaseExperts"]
    assert "moetool" in stderr.partition("without moetool:")[0]


def test_where_moetool_is_installed_nobody_has_to_import_it(processes: dict[str, subprocess.Popen[str]]) -> None:
    stdout, stderr = processes["moetool never"].communicate(timeout=120)
    assert processes["moetool never"].returncode == 0, stderr
    assert stdout.splitlines() == ["SharedBaseExperts", "deepseek"]


def test_installing_twice_is_harmless() -> None:
    finders = list(sys.meta_path)
    autoload.install()
    autoload.install()
    assert sys.meta_path == finders
