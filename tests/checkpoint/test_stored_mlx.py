"""Checkpoints of mlx-lm: decoded as MLX does, under the names and in the shapes of the hub."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from around_dense import build_around
from dense_families import build_dense
from derived_families import DERIVED
from safetensors.torch import load_file, save_file
from stored_bits import CONFIG, FILE
from stored_mlx import NORMS, decoded_mlx, in_its_order, save_mlx
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.stored.formats import expected_bytes
from moetool.errors import InvalidInputError
from moetool.job.blueprint import check_against_config
from moetool.runtime.loading import load_model

WIDE: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": {"moe_intermediate_size": 64, "qk_nope_head_dim": 32, "v_head_dim": 16, "kv_lora_rank": 32},
    "gpt_oss": {**DERIVED["gpt_oss"], "intermediate_size": 64},
    "qwen3_next": {},
}
DENSE: dict[str, dict[str, Any]] = {"gpt2": {}, "granitemoehybrid": {"mamba_d_head": 32}}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`source(family)`: a tiny model in bf16."""
    root, made = tmp_path_factory.mktemp("mlx"), dict[str, Path]()

    def make(family: str) -> Path:
        if family not in made:
            own = {"hidden_size": 64, **WIDE.get(family, {}), **DENSE.get(family, {})}
            build = families.build if family in WIDE else build_dense
            model = build(family, dtype=torch.bfloat16, **own)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if family == "qwen3_next" and NORMS.search(name):
                        parameter.sub_(1)  # as that of a trained one: what is added to one loses no bit then
            made[family] = save_model(model, root / family)
        return made[family]

    return make


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], object], **entries: object) -> Path:
    """A checkpoint of mlx-lm whose tensors and config were changed."""
    held = load_file(path / FILE)
    change(held)
    save_file({name: own.contiguous() for name, own in held.items()}, path / FILE, {"format": "mlx"})
    (path / CONFIG).write_text(json.dumps({**json.loads((path / CONFIG).read_text()), **entries}))
    return path


@pytest.mark.parametrize(
    ("mode", "bits", "group", "expected"),
    [
        ("affine", 2, 32, "93cfbe4858027fb6"),
        ("affine", 3, 64, "fe9d33006ebe43ed"),
        ("affine", 4, 32, "33522f8fc7d0a331"),
        ("affine", 5, 128, "4d2befae92252da3"),
        ("affine", 6, 64, "e6b581074b713c09"),
        ("affine", 8, 128, "da7a8d773ce8c569"),
        ("mxfp4", 4, 32, "bf86335831378cb4"),
        ("nvfp4", 4, 16, "b25b7663a020346d"),
        ("mxfp8", 8, 32, "930e3f5b23096856"),
    ],
)
def test_bits_are_those_of_mlx(source: Make, tmp_path: Path, mode: str, bits: int, group: int, expected: str) -> None:
    """The digest is of what `mx.dequantize` of MLX 0.32.4 makes of these tensors on a processor, in bf16."""
    words = (np.arange(16 * 128 * bits // 32, dtype=np.uint64) * 2654435761 + 12345) % 2**32
    words = words & 0x7E7E7E7E if mode == "mxfp8" else words  # no NaN
    count = 16 * 128 // group
    extra = {"extra.weight": torch.from_numpy(words.astype(np.uint32)).view(16, -1)}
    if mode == "affine":
        extra["extra.scales"] = ((torch.arange(count) + 1) / 64).view(16, -1).bfloat16()
        extra["extra.biases"] = ((torch.arange(count) % 7 - 5) / 3).view(16, -1).bfloat16()
    else:
        extra["extra.scales"] = (torch.arange(count) % 9 + (40 if mode == "nvfp4" else 118)).view(16, -1).byte()
    path = save_mlx(source("mixtral"), tmp_path / "model", None)
    entry = {"bits": bits, "group_size": group, "mode": mode}
    shown = Checkpoint.open(rewritten(path, lambda held: held.update(extra), quantization=entry))
    found = shown.read("extra.weight")
    assert hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] == expected
    assert shown.read_rows("extra.weight", 3, 11).equal(found[3:11])


@pytest.mark.parametrize("family", [*WIDE, *DENSE])
def test_names_and_shapes_are_those_of_the_hub(source: Make, tmp_path: Path, family: str) -> None:
    plain = Checkpoint.open(source(family))
    shown = Checkpoint.open(save_mlx(source(family), tmp_path / "mlx", None))
    check_against_config(shown)
    assert shown.shapes == plain.shapes
    for name in plain.tensors:
        whole = plain.read(name)
        if shown.config["model_type"] == "qwen3_next" and NORMS.search(name):
            assert (shown.read(name) - whole).abs().max() < 2**-8
            continue
        assert shown.read(name).equal(whole), name
        assert torch.cat([*shown.blocks(name, 700)]).equal(whole.reshape(-1)), name
    assert shown.stored_as == "MLX, in 16 bits or more"


@pytest.mark.parametrize("family", [*WIDE, *DENSE])
def test_codes_are_decoded_in_the_shapes_of_the_hub(source: Make, tmp_path: Path, family: str) -> None:
    """Against tensors that are decoded in mlx-lm's order of a model whose own tensors are those codes."""
    path = save_mlx(source(family), tmp_path / "mlx", 3, 32)
    shown, held = Checkpoint.open(path), load_file(path / FILE)
    check_against_config(shown)
    config = json.loads((path / CONFIG).read_text())
    again = in_its_order({name: shown.read(name) for name in shown.tensors}, config)
    modules = [name.removesuffix(".scales") for name in held if name.endswith(".scales")]
    assert any("proj" in own for own in modules)
    for module in modules:
        parts = {part: held[f"{module}.{part}"] for part in ("weight", "scales", "biases")}
        assert again[f"{module}.weight"].equal(decoded_mlx(parts, 3, 32)), module
    assert all(again[name].equal(held[name]) for name in again if name.removesuffix(".weight") not in modules)
    assert shown.stored_as == "MLX (3 bits in groups of 32)"


def test_modules_in_bits_of_their_own(source: Make, tmp_path: Path) -> None:
    """Of a group of 64 inputs in 4 bits as many words are stored as of 32 in 8: the config tells them apart."""
    first = "model.layers.0.block_sparse_moe"
    own = {
        f"{first}.gate": {"group_size": 32, "bits": 8},
        f"{first}.switch_mlp.down_proj": {"group_size": 32, "bits": 8},
        "lm_head": {"group_size": 64, "bits": 6},
    }
    path = save_mlx(source("mixtral"), tmp_path / "mlx", 4, 64, own)
    shown, plain = Checkpoint.open(path), Checkpoint.open(source("mixtral"))
    check_against_config(shown)
    assert shown.shapes == plain.shapes
    assert shown.stored_as == "MLX (4 bits in groups of 64, 8 bits in groups of 32, 6 bits in groups of 64)"
    for name in (f"{first}.gate.weight", f"{first}.experts.3.w2.weight", "lm_head.weight"):
        found, expected = shown.read(name).float(), plain.read(name).float()
        assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_setting_that_the_config_lacks_is_what_alone_fits(source: Make, tmp_path: Path) -> None:
    own = {"lm_head": {"group_size": 64, "bits": 5}}
    path = save_mlx(source("mixtral"), tmp_path / "mlx", 4, 32, own)
    entry = {"group_size": 32, "bits": 4}
    rewritten(path, lambda held: None, quantization=entry, quantization_config=entry)
    assert Checkpoint.open(path).info("lm_head.weight").shape == (288, 64)


def test_the_dtype_is_that_of_the_files(source: Make, tmp_path: Path) -> None:
    """mlx-lm leaves the source's in the config (`--dtype`)."""

    def change(held: dict[str, Tensor]) -> None:
        held |= {name: own.half() for name, own in held.items() if own.is_floating_point()}

    shown = Checkpoint.open(rewritten(save_mlx(source("mixtral"), tmp_path / "mlx"), change))
    assert shown.config["dtype"] == "float16"
    assert {info.dtype for info in shown.tensors.values()} == {torch.float16}


def test_an_entry_of_the_first_versions(source: Make, tmp_path: Path) -> None:
    path = save_mlx(source("mixtral"), tmp_path / "mlx")
    config = json.loads((path / CONFIG).read_text())
    del config["quantization_config"], config["quantization"]["mode"]
    (path / CONFIG).write_text(json.dumps(config))
    shown = Checkpoint.open(path)
    assert shown.stored_as == "MLX (4 bits in groups of 32)"
    assert "quantization" not in shown.config


def test_a_model_whose_names_are_the_hubs_is_an_ordinary_one(save_model: Any, tmp_path: Path) -> None:
    source = save_model(build_dense("llama", dtype=torch.bfloat16), tmp_path / "source")
    shown = Checkpoint.open(save_mlx(source, tmp_path / "mlx", None))
    assert shown.stored_as is None
    assert not shown.forms


def test_a_language_model_within_another_is_read_alone(save_model: Any, tmp_path: Path) -> None:
    """As mlx-lm has it, with and without the eye, which mlx-vlm keeps."""
    source = save_model(build_around("qwen3_vl/qwen3_vl_text").bfloat16(), tmp_path / "source")
    (path := tmp_path / "mlx").mkdir()
    held = {
        name.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head"): own
        for name, own in load_file(source / FILE).items()
    }
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    save_file(held, path / FILE, {"format": "mlx"})
    shown = Checkpoint.open(path)
    check_against_config(shown)
    assert shown.config["model_type"] == "qwen3"
    assert shown.stored_as == "MLX, in 16 bits or more, the language model of qwen3_vl alone"
    assert all(shown.read(name).equal(held[f"language_model.{name}"]) for name in shown.tensors)
    tokens = torch.arange(20).view(1, -1)
    with torch.no_grad():
        found, expected = (load_model(own, torch.float32)(tokens).logits for own in (shown, Checkpoint.open(source)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "falcon_h1"])
def test_families_that_cannot_be_turned_back_are_named(source: Make, tmp_path: Path, kind: str) -> None:
    path = rewritten(save_mlx(source("mixtral"), tmp_path / "mlx"), lambda held: None)
    (path / CONFIG).write_text(json.dumps({**json.loads((path / CONFIG).read_text()), "model_type": kind}))
    with pytest.raises(InvalidInputError, match=f"is a {kind} that mlx-lm has written. It .* take the checkpoint that"):
        Checkpoint.open(path)


def test_bytes_from_a_config(tmp_path: Path) -> None:
    entry = {"group_size": 64, "bits": 4, "quant_method": "mlx", "b.up": {"group_size": 32, "bits": 8}}
    config = {"dtype": "bfloat16", "quantization_config": entry}
    shapes = {f"{name}.up.weight": (64, 64) for name in "ab"}
    assert expected_bytes(config, shapes, tmp_path) == {"a.up.weight": 2304, "b.up.weight": 4608}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop("lm_head.scales"), "there is no lm_head.scales|lm_head.weight is missing"),
        (lambda held: held.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda held: held.update({"lm_head.scales": held["lm_head.scales"][1:]}), "these are not of one matrix"),
        (lambda held: held.update({"lm_head.biases": held["lm_head.biases"].float()}), "these are not of one matrix"),
        (lambda held: held.update({"lm_head.scales": held["lm_head.scales"][:, :1]}), "these are not of one matrix"),
        (
            lambda held: held.update({"lm_head.global_scale": torch.ones(1)}),
            "lm_head has a scale for all of an expert",
        ),
        (
            lambda held: held.update(
                {name: own[:3] for name, own in held.items() if "layers.1" in name and ".up_proj." in name}
            ),
            r"switch_mlp.up_proj.\w+ has shape \[3, .* config.json says 4 experts in 3 layers",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    source: Make, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    path = rewritten(save_mlx(source("mixtral"), tmp_path / "mlx"), change)
    with pytest.raises(InvalidInputError, match=says):
        Checkpoint.open(path)


def test_norms_are_as_they_are_where_convolutions_are(source: Make, tmp_path: Path) -> None:
    """mlx-lm adds one to norms where it turns convolutions: files in which these lie as on the hub are not its work."""
    path = save_mlx(source("qwen3_next"), tmp_path / "mlx", None)
    plain = load_file(source("qwen3_next") / FILE)

    def change(held: dict[str, Tensor]) -> None:
        held |= {name: own for name, own in plain.items() if "conv1d" in name or NORMS.search(name)}

    shown = Checkpoint.open(rewritten(path, change))
    assert all(shown.read(name).equal(plain[name]) for name in plain if NORMS.search(name))


def test_two_names_of_one_tensor_are_refused(source: Make, tmp_path: Path) -> None:
    path = save_mlx(source("mixtral"), tmp_path / "mlx", None)
    own = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    with pytest.raises(InvalidInputError, match=f"has {own} twice"):
        Checkpoint.open(rewritten(path, lambda held: held.update({own: torch.ones(64, 64).bfloat16()})))


def test_half_of_a_projection_is_refused(source: Make, tmp_path: Path) -> None:
    path = save_mlx(source("deepseek_v3"), tmp_path / "mlx", None)
    lost = "model.layers.0.self_attn.unembed_out.weight"
    with pytest.raises(InvalidInputError, match=f"{lost} is missing"):
        Checkpoint.open(rewritten(path, lambda held: held.pop(lost)))
