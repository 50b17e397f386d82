"""`export --format gguf` on a text: what llama-quantize is told, and files that are continued."""

from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, contents, copy_of, load
from families import build
from safetensors.torch import load_file, save_file
from sampling import sampled
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.checkpoint.files import TEMPORARY

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")

SAMPLES, LENGTH = 16, 32


def export(run_cli: Any, source: Path, target: Path, *options: object) -> Any:
    return run_cli("export", source, target, "--format", "gguf", *options)


def stored(file: Path) -> dict[str, Tensor]:
    """Every tensor of an importance matrix."""
    return {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(file).tensors}


def windows_of(path: Path, text: Path) -> Tensor:
    return sample_windows(str(text), load_tokenizer(path), samples=SAMPLES, sequence_length=LENGTH, seed=0)


def squared_inputs(path: Path, windows: Tensor) -> dict[str, Tensor]:
    """By module of transformers' own model, Σ x² of what each linear layer is given."""
    model, found = load(path), defaultdict[str, Any](int)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def see(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                found[name] = found[name] + inputs[0].flatten(0, -2).double().square().sum(0)

            module.register_forward_pre_hook(see)
    with torch.no_grad():
        model(windows)
    return found


@pytest.fixture(scope="module")
def advised(run_cli: Any, calibration: tuple[object, ...], tiny_mixtral: Path, tmp_path_factory: Any) -> Path:
    """A tiny Mixtral with all that llama-quantize can be told."""
    target = tmp_path_factory.mktemp("advised") / "out"
    result = export(run_cli, tiny_mixtral, target, *calibration, "--type", "f16", "--target-bpw", 9)
    assert result.code == 0, result.stderr
    assert "bits per weight" in result.stderr
    told = next(said for said in result.stderr.splitlines() if "llama-quantize" in said)
    assert f"llama-quantize --imatrix {target}/imatrix.gguf --tensor-type-file {target}/tensor-types.txt" in told
    return target


def test_an_importance_matrix_is_what_every_matrix_was_given(
    advised: Path, tiny_mixtral: Path, tiny_text: Path
) -> None:
    found, windows = stored(advised / "imatrix.gguf"), windows_of(tiny_mixtral, tiny_text)
    inputs, tokens = squared_inputs(tiny_mixtral, windows), windows.numel()
    for layer in range(3):
        for part in ("q", "k", "v"):
            own = found[f"blk.{layer}.attn_{part}.weight.in_sum2"]
            torch.testing.assert_close(own[0].double(), inputs[f"model.layers.{layer}.self_attn.{part}_proj"])
            assert found[f"blk.{layer}.attn_{part}.weight.counts"].tolist() == [[tokens]]
        counts = found[f"blk.{layer}.ffn_up_exps.weight.counts"]
        assert counts.shape == (4, 1)
        assert counts.sum() == 2 * tokens
        assert found[f"blk.{layer}.ffn_up_exps.weight.in_sum2"].shape == (4, 32)
        assert found[f"blk.{layer}.ffn_down_exps.weight.in_sum2"].shape == (4, 48)
        assert torch.equal(
            found[f"blk.{layer}.ffn_gate_exps.weight.in_sum2"], found[f"blk.{layer}.ffn_up_exps.weight.in_sum2"]
        )
    fields = {key: field.contents() for key, field in gguf.GGUFReader(advised / "imatrix.gguf").fields.items()}
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] in (str(tiny_text), [str(tiny_text)])
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (SAMPLES, LENGTH)


def test_it_is_the_same_without_gradients(
    run_cli: Any, calibration: tuple[object, ...], tiny_mixtral: Path, advised: Path, tmp_path: Path
) -> None:
    assert export(run_cli, tiny_mixtral, tmp_path / "out", *calibration).code == 0
    assert (tmp_path / "out" / "imatrix.gguf").read_bytes() == (advised / "imatrix.gguf").read_bytes()
    assert (tmp_path / "out" / "model.gguf").read_bytes() == (advised / "model.gguf").read_bytes()
    assert not (tmp_path / "out" / "tensor-types.txt").exists()


MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "olmoe": {"num_key_value_heads": 4, "norm_topk_prob": False},
    "granitemoe": {},
    "granitemoeshared": {},
}
SHARED = {
    "qwen2_moe": ("mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    "granitemoeshared": ("shared_mlp.input_linear", "shared_mlp.output_linear"),
}


@pytest.mark.parametrize("family", sampled(MODELS, tuple(MODELS)[::2]))
def test_every_matrix_of_a_layer_has_both(
    run_cli: Any,
    calibration: tuple[object, ...],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_text: Path,
    tmp_path: Path,
    family: str,
) -> None:
    """Shared experts among them, whose gate and up are one module in Granite-MoE."""
    path = tmp_path / "in"
    build(family, **MODELS[family]).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    result = export(run_cli, path, tmp_path / "out", *calibration, "--type", "f16", "--target-bpw", 12)
    assert result.code == 0, result.stderr
    found = stored(tmp_path / "out" / "imatrix.gguf")
    tensors = gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
    few = {tensor.name for tensor in tensors if tensor.name.startswith("blk.") and tensor.tensor_type.name == "F16"}
    assert {name.removesuffix(".counts") for name in found if name.endswith(".counts")} == few
    first, last = SHARED.get(family, ("", ""))
    inputs = squared_inputs(path, windows_of(path, tiny_text)) if first else {}
    for part, module in {"gate": first, "up": first, "down": last}.items() if first else ():
        own = found[f"blk.1.ffn_{part}_shexp.weight.in_sum2"]
        torch.testing.assert_close(own[0].double(), inputs[f"model.layers.1.{module}"])


def test_dense_models_have_both(
    run_cli: Any, calibration: tuple[object, ...], dense: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    path = dense("llama", hidden_size=256, intermediate_size=256)
    result = export(run_cli, path, tmp_path / "out", *calibration, "--type", "f16", "--target-bpw", 4.5)
    assert result.code == 0, result.stderr
    found, inputs = stored(tmp_path / "out" / "imatrix.gguf"), squared_inputs(path, windows_of(path, tiny_text))
    torch.testing.assert_close(
        found["blk.1.ffn_down.weight.in_sum2"][0].double(), inputs["model.layers.1.mlp.down_proj"]
    )
    lines = (tmp_path / "out" / "tensor-types.txt").read_text().splitlines()
    assert len({line.rpartition("=")[2] for line in lines}) > 1
    if find_spec("llama_cpp") is not None:
        check_with_llama_cpp(tmp_path / "out", lines)


def check_with_llama_cpp(output: Path, lines: list[str]) -> None:
    """llama.cpp's quantizer takes importance and types, and the file has the bits that were asked for."""
    import ctypes

    import llama_cpp

    known = {number.name.lower(): int(number) for number in gguf.GGMLQuantizationType}
    types = [(line.rpartition("=")[0].encode(), known[line.rpartition("=")[2].lower()]) for line in lines]
    means = {
        name.removesuffix(".in_sum2"): (sums / stored(output / "imatrix.gguf")[name[:-7] + "counts"]).numpy()
        for name, sums in stored(output / "imatrix.gguf").items()
        if name.endswith(".in_sum2")
    }
    pointer = ctypes.POINTER(ctypes.c_float)
    entries = [(name.encode(), mean.ctypes.data_as(pointer), mean.size) for name, mean in means.items()]
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    settings.imatrix = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
    settings.tt_overrides = (llama_cpp.llama_model_tensor_override * (len(types) + 1))(*types)
    files = bytes(output / "model.gguf"), bytes(output / "small.gguf")
    assert not llama_cpp.llama_model_quantize(*files, ctypes.byref(settings))
    made = gguf.GGUFReader(output / "small.gguf").tensors
    numbers = {tensor.name: int(tensor.tensor_type) for tensor in made}
    assert all(numbers[pattern.decode().strip("^$").replace("\\", "")] == kind for pattern, kind in types)
    bits = 8 * sum(int(tensor.n_bytes) for tensor in made) / sum(int(tensor.n_elements) for tensor in made)
    assert 4.2 < bits <= 4.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--target-bpw", 4, "--type", "f16"), "--calibration"),
        (("--target-bpw", 4, "--calibration", "TEXT", "--type", "q8_0"), "makes nothing of q8_0"),
        (("--target-bpw", 4, "--calibration", "TEXT", "--type", "f16"), "is less than this model can have"),
        (("--target-bpw", 0), "target"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    result = export(run_cli, tiny_mixtral, tmp_path / "out", *(tiny_text if one == "TEXT" else one for one in options))
    assert result.code == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_experts", [True, False])
def test_only_a_model_with_experts_can_have_fewer(
    run_cli: Any, dense: Callable[..., Path], tiny_mixtral: Path, tmp_path: Path, has_experts: bool
) -> None:
    model = tiny_mixtral if has_experts else dense("llama")
    result = run_cli("export", model, tmp_path / "out", "--format", "gguf", "--size", "1kB", "--dry-run")
    assert result.code == 2
    assert "in llama.cpp's types this model takes from" in result.stderr
    assert ("take out experts" in result.stderr) is has_experts


def test_a_family_that_llama_cpp_does_not_know(
    run_cli: Any, calibration: tuple[object, ...], tiny_mixtral: Path, tmp_path: Path
) -> None:
    path = change_config(copy_of(tiny_mixtral, tmp_path / "in"), model_type="phimoe")
    result = export(run_cli, path, tmp_path / "out", *calibration)
    assert result.code == 3
    assert "SparseMixer" in result.stderr


@pytest.fixture(scope="module")
def whole(crash: Any, tiny_mixtral: Path, tmp_path_factory: Any) -> tuple[int, Path]:
    """How often an undisturbed export touches its files, and where they are."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    return crash.whole(output, ("export", tiny_mixtral, "--format", "gguf")), output


@pytest.mark.parametrize("part", sampled([1, 3, 5], [3]))
def test_a_killed_export_continues(
    crash: Any, whole: tuple[int, Path], tiny_mixtral: Path, tmp_path: Path, part: int
) -> None:
    """With what was noted of the unfinished file; the result is the same to the byte."""
    count, expected = whole
    crash.goes_on(tmp_path / "out", ("export", tiny_mixtral, "--format", "gguf"), count * part // 6, expected)


@pytest.fixture(scope="module")
def stopped(crash: Any, whole: tuple[int, Path], tiny_mixtral: Path, tmp_path_factory: Any) -> Path:
    """An export that was killed when some of its layers were noted, to be copied and continued."""
    for at in range(whole[0] // 4, whole[0]):
        output: Path = tmp_path_factory.mktemp("stopped") / "out"
        crash(output, ("export", tiny_mixtral, "--format", "gguf"), at=at)
        if '"write/1"' in (output / ".moetool" / "journal.jsonl").read_text():
            return output
    raise AssertionError("no layer was noted")


@pytest.mark.parametrize("damage", ["cut", "changed", "lost", "longer"])
def test_an_unfinished_file_is_taken_up_only_as_it_was_noted(
    crash: Any,
    whole: tuple[int, Path],
    stopped: Path,
    tiny_mixtral: Path,
    tmp_path: Path,
    damage: str,
) -> None:
    output, arguments = copy_of(stopped, tmp_path / "out"), ("export", tiny_mixtral, "--format", "gguf")
    file = output / f"model.gguf{TEMPORARY}"
    content = file.read_bytes()
    if damage == "lost":
        file.unlink()
    else:
        middle = len(content) // 2
        made = {"cut": content[:middle], "changed": content[:middle] + b"no" + content[middle + 2 :]}
        file.write_bytes(made.get(damage, content + b"more"))
    assert crash(output, (*arguments, "--resume"))["code"] == 0
    assert contents(output) == contents(whole[1])


def test_a_number_that_does_not_fit_leaves_nothing(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    path = copy_of(tiny_mixtral, tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][0, 0] = 1e6
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    result = export(run_cli, path, tmp_path / "out")
    assert result.code == 3
    assert "--type bf16" in result.stderr
    assert not (tmp_path / "out").exists()
