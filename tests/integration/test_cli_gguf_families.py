"""`export --format gguf` of every family that it knows: what the file holds, and what llama.cpp makes of it."""

import copy
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from around_dense import AROUND_DENSE
from checkpoints import config_of, copy_of, load, tensors_of
from dense_families import build_dense
from families import add_prediction_layer
from gguf_models import DENSE_GGUF_MODELS, GGUF_MODELS, LINEAR, READ_MODELS, WHOLE, WINDOW, gguf_model
from safetensors.torch import save_file
from sampling import sampled
from stored_bits import save_mxfp4
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig

from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.format.gguf.words import halved
from moetool.runtime.loading import load_model

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")

# Said of shared experts without neurons, which transformers makes where a config has none.
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")

Made = Callable[[str], Path]
TURNED = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LONG_ROPE = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PUBLISHED_GPT_OSS = {
    **YARN,
    "rope_theta": 1.5e5,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
HALF_TURNED = {**TURNED, "partial_rotary_factor": 0.5}
MODELS = (*GGUF_MODELS, *DENSE_GGUF_MODELS, *AROUND_DENSE)
DENSE_STRUCTURES = ("gemma3", "phi3-partial", "gpt2", "qwen3_vl/qwen3_vl_text", "mistral3/ministral3-long")
STRUCTURES = (
    "deepseek_v3",
    "gpt_oss",
    "lfm2_moe",
    "cohere2_moe",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "nemotron_h",
    "llama4",
    *DENSE_STRUCTURES,
)
READ_STRUCTURES = (
    "gpt_oss",
    "gemma4_text-sharing",
    "gemma3-stretched",
    "glm4_moe",
    "qwen3_next",
    "deepseek_v3-scores",
    "glm_moe_dsa-shared",
    "llama4_text",
    "lfm2_moe",
    "granitemoehybrid",
    "granitemoehybrid-unshared",
    "granitemoehybrid-dense",
    "stablelm-parallel",
    "apertus",
    "gpt2",
    "falcon",
    "falcon-groups",
    "mpt",
    "jamba",
    "nemotron_h-latent",
    "nemotron_h-dense",
    "kimi_linear",
    "internlm3",
    "sarvam_moe-partial",
)
QUANTIZED = ("deepseek_v3", "llama4_text", "lfm2_moe", "granitemoehybrid", "gemma4_text", "jamba", "nemotron_h")
# Through which a text can go layer by layer.
CALIBRATED = [name for name in MODELS if name != "glm_moe_dsa-shared" and "sharing" not in name]
# With GELU, where the last bit of 16 may differ.
_WITH_GELU = ("gemma", "starcoder2", "phi-", "gpt2", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "mpt")


@pytest.fixture(scope="session")
def model(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model with a tokenizer, by name, made when it is asked for."""
    made: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        if changes or name not in made:
            path = tmp_path_factory.mktemp("gguf") / "model"  # of one that is called Phi-3 llama.cpp wants its tokens
            gguf_model(name, **changes).save_pretrained(path)
            tiny_tokenizer.save_pretrained(path)
            if changes:
                return path
            made[name] = path
        return made[name]

    return make


def export(run_cli: Any, source: Path, target: Path, *options: object) -> Any:
    return run_cli("export", source, target, "--format", "gguf", *options, "--json")


def logits_in_llama_cpp(file: Path, tokens: torch.Tensor, *, flash_attn: bool = False) -> torch.Tensor:
    from llama_cpp import GGML_TYPE_F32, Llama

    kept = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn": flash_attn}
    threads = {"n_threads": 1, "n_threads_batch": 1}
    llama = Llama(str(file), n_ctx=len(tokens) + 16, logits_all=True, verbose=False, **threads, **kept)
    llama.eval(tokens.tolist())
    found = torch.from_numpy(llama.scores[: len(tokens)].copy())
    llama.close()
    return found


def contents_of(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata of a file and, in fp32, its tensors."""
    reader = gguf.GGUFReader(file)
    entries = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return entries, {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}


def write_file(target: Path, source: Path, entries: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write metadata, of the types that they have in `source`, and tensors, of whatever architecture."""
    start = "general.architecture"
    fields, architecture = gguf.GGUFReader(source).fields, entries[start]
    own = f"{fields[start].contents()}."
    kinds = {re.sub(f"^{re.escape(own)}", f"{architecture}.", key): field.types for key, field in fields.items()}
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in entries.items():
        if key != start:
            writer.add_key_value(key, value, *kinds[key][:2])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_alike(caplog: Any, *files: Path) -> None:
    """Two files are read as the same model, and without a word."""
    caplog.clear()
    first, second = (Checkpoint.open(file) for file in files)
    assert not caplog.records
    assert first.config == second.config
    own, other = tensors_of(first.path), tensors_of(second.path)
    assert own.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())


class _Table(torch.nn.Module):
    """GELU as llama.cpp looks it up: of numbers of 16 bits, in as many."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.gelu(inputs.half().float(), approximate="tanh").half().float()
        return torch.where(inputs.abs() < 10, found, inputs.clamp_min(0))


def with_table(model: Any) -> Any:
    """A model with every GELU from a table."""
    for module in model.modules():
        for name, inner in module.named_children():
            if "gelu" in type(inner).__name__.lower():
                setattr(module, name, _Table())
    return model


@pytest.mark.parametrize("name", sampled(MODELS, STRUCTURES))
def test_every_tensor_is_one_that_llama_cpp_knows(run_cli: Any, model: Made, tmp_path: Path, name: str) -> None:
    """Read back by moetool, the first layer with experts is the checkpoint's (`export` sees to it itself); every name
    is in the library's list of the architecture, where it has one."""
    result = export(run_cli, model(name), tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    architecture = reader.fields["general.architecture"].contents()
    known = {own: arch for arch, own in gguf.MODEL_ARCH_NAMES.items()}
    if architecture in known:
        own = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[known[architecture]]}
        if "blk.{bid}.ffn_gate_up_exps" in own:  # read in two tensors, too
            own |= {"blk.{bid}.ffn_gate_exps", "blk.{bid}.ffn_up_exps"}
        for tensor in reader.tensors:
            base = re.sub(r"^blk\.\d+\.", "blk.{bid}.", tensor.name)
            assert re.sub(r"\.(weight|bias|scale)$", "", base) in own, tensor.name


@pytest.mark.parametrize("name", sampled(READ_MODELS, READ_STRUCTURES))
def test_a_file_is_read_as_the_model_that_it_was_made_of(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    assert export(run_cli, model(name), tmp_path / "out", "--type", "f32").code == 0
    caplog.clear()
    found = Checkpoint.open(tmp_path / "out" / "model.gguf")
    assert not caplog.records
    tokens = torch.arange(3, 67)[None]
    before, after = (one(tokens).logits.detach() for one in (load(model(name)), load_model(found, torch.float32)))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("name", sampled((*QUANTIZED, "kimi_linear", "sarvam_moe"), ("deepseek_v3", "gemma4_text")))
def test_commands_take_a_quantized_file(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    assert export(run_cli, model(name), tmp_path / "out", "--type", "q4_k").code == 0
    file = tmp_path / "out" / "model.gguf"
    plan = run_cli("compress", file, tmp_path / "none", "--method", "hybrid", "--ratio", 0.3, "--dry-run", "--json")
    assert plan.code == 0, plan.stderr
    result = run_cli("compress", file, tmp_path / "small", "--method", "quantize", "--bits", 4, "--json")
    assert result.code == 0, result.stderr


def test_an_early_file_of_deepseek_is_read_as_a_later_one(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """From before llama.cpp multiplied queries by half of a matrix: that is whole, and widths are those of heads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    assert export(run_cli, model("deepseek_v3-yarn"), tmp_path / "out", "--type", "f32").code == 0
    later, early, start = tmp_path / "out" / "model.gguf", tmp_path / "early.gguf", "deepseek2.attention."
    entries, tensors = contents_of(later)
    entries |= {f"{start}{kind}_length": entries.pop(f"{start}{kind}_length_mla") for kind in ("key", "value")}
    entries[f"{start}head_count_kv"] = entries[f"{start}head_count"]
    for layer in range(entries["deepseek2.block_count"]):
        keys, values = (tensors.pop(f"blk.{layer}.attn_{kind}_b.weight") for kind in "kv")
        tensors[f"blk.{layer}.attn_kv_b.weight"] = torch.cat([keys.swapaxes(1, 2), values], dim=1).flatten(0, 1)
    write_file(early, later, entries, tensors)
    assert_alike(caplog, later, early)


def test_a_file_that_transformers_would_compute_otherwise_is_no_input(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    assert export(run_cli, model("mpt"), tmp_path / "out", "--type", "f32").code == 0
    entries, tensors = contents_of(tmp_path / "out" / "model.gguf")
    without = {**entries, "mpt.attention.max_alibi_bias": 0.0}
    write_file(tmp_path / "without.gguf", tmp_path / "out" / "model.gguf", without, tensors)
    with pytest.raises(InvalidInputError, match="has no ALiBi"):
        Checkpoint.open(tmp_path / "without.gguf")


@pytest.mark.parametrize("name", ["gemma4_text", "qwen3_moe-yarn"])
def test_gate_and_up_of_experts_may_lie_in_one_tensor(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, name: str
) -> None:
    """As llama.cpp's converter writes Gemma 4, and others where it is asked to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    assert export(run_cli, model(name), tmp_path / "out", "--type", "f32").code == 0
    apart, joined = tmp_path / "out" / "model.gguf", tmp_path / "joined.gguf"
    entries, tensors = contents_of(apart)
    for own in [own for own in tensors if own.endswith("ffn_gate_exps.weight")]:
        parts = [tensors.pop(own.replace("gate", role)) for role in ("gate", "up")]
        tensors[own.replace("gate", "gate_up")] = torch.cat(parts, dim=1)
    write_file(joined, apart, entries, tensors)
    assert_alike(caplog, apart, joined)


@pytest.fixture
def exaone(run_cli: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A Llama, and the file of an EXAONE 3 with its numbers: rotary embeddings turn rows that are half a head apart in
    llama.cpp's, too."""
    path, written, own = tmp_path / "llama", tmp_path / "out" / "model.gguf", tmp_path / "exaone.gguf"
    build_dense("llama-rope-scaled", vocab_size=320).save_pretrained(path)
    assert export(run_cli, path, tmp_path / "out", "--type", "f32").code == 0
    entries, tensors = contents_of(written)
    heads = {"attn_q": entries["llama.attention.head_count"], "attn_k": entries["llama.attention.head_count_kv"]}
    for name in tensors:
        if (count := heads.get(name.rpartition(".weight")[0].rpartition(".")[2])) is not None:
            tensors[name] = halved(tensors[name], count)
    entries = {re.sub(r"^llama\.", "exaone.", key): value for key, value in entries.items()}
    write_file(own, written, {**entries, "general.architecture": "exaone"}, tensors)
    return path, own


def test_exaone_3_is_read_as_the_llama_that_it_is(
    exaone: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    source, file = exaone
    caplog.clear()
    found = Checkpoint.open(file).path
    assert not caplog.records
    expected, read = tensors_of(source), tensors_of(found)
    assert read.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())
    tokens = torch.arange(3, 67)[None]
    torch.testing.assert_close(load(found)(tokens).logits, load(source)(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="wants llama-cpp-python, which compiles llama.cpp")
def test_llama_cpp_computes_exaone_3_as_that_llama(exaone: tuple[Path, Path]) -> None:
    source, file = exaone
    tokens = torch.arange(3, 51)
    found, expected = logits_in_llama_cpp(file, tokens), load(source)(tokens[None]).logits[0]
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", ["minimax", "mimo_v2_flash"])
def test_an_export_that_moetool_does_not_read_is_verified(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By its digests and numbers; what comes next of it is a command that this machine can run."""
    out = tmp_path / "out"
    monkeypatch.setattr("shutil.which", lambda program: "/bin/moetool" if program == "moetool" else None)
    monkeypatch.setattr("moetool.cli.next_step.importlib.util.find_spec", lambda library: None)
    said = run_cli("export", model(name), out, "--format", "gguf", "--type", "f32").stderr.splitlines()[-1]
    assert said == f"next: moetool verify {out}"
    found = run_cli("verify", out, "--json")
    assert found.code == 0, found.stderr
    assert found.json["tensors"] == len(gguf.GGUFReader(out / "model.gguf").tensors)
    assert "does not read" in found.json["notes"][0]
    assert "next: " not in run_cli("verify", out).stderr
    content = bytearray((out / "model.gguf").read_bytes())
    content[-4:] = b"\xff" * 4
    (out / "model.gguf").write_bytes(content)
    damaged = run_cli("verify", out)
    assert damaged.code == 5
    assert "model.gguf" in damaged.stderr
    assert "holds NaN or infinity" in damaged.stderr


@pytest.mark.parametrize("name", ["granitemoehybrid", "falcon_h1", "lfm2_moe", "gpt_oss", "deepseek_v3"])
def test_what_is_never_quantized(run_cli: Any, model: Made, tmp_path: Path, name: str) -> None:
    """llama.cpp computes some tensors in fp32 alone, whatever they look like."""
    export(run_cli, model(name), tmp_path / "out", "--type", "q8_0")
    types = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    kept = ("ssm_a", "ssm_d", "conv1d.weight", "shortconv.conv.weight", "norm.weight", "sinks.weight", ".bias")
    found = {name: number for name, number in types.items() if name.endswith((*kept, "ffn_gate_inp.weight"))}
    assert len(found) > 6
    assert set(found.values()) == {"F32"}


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="wants llama-cpp-python, which compiles llama.cpp")
@pytest.mark.parametrize("name", [*GGUF_MODELS, *sampled((*DENSE_GGUF_MODELS, *AROUND_DENSE), DENSE_STRUCTURES)])
def test_llama_cpp_computes_the_same(run_cli: Any, model: Made, tmp_path: Path, name: str) -> None:
    result = export(run_cli, model(name), tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    count = 200 if "deepseek_v4" in name else 48  # of which it compresses 128 into one
    tokens = torch.randint(288, (count,), generator=torch.Generator().manual_seed(0))
    tokens[20] = 7  # where n-grams begin anew
    found = logits_in_llama_cpp(tmp_path / "out" / "model.gguf", tokens)
    expected = with_table(load(model(name)))(tokens[None]).logits[0]
    own = 5e-4 if name.startswith(_WITH_GELU) else 1e-4
    assert (found - expected).norm() < own * expected.norm()


def test_yarn_that_ends_between_channels_is_a_note(run_cli: Any, model: Any, tmp_path: Path) -> None:
    for name, rope in (("between", PUBLISHED_GPT_OSS), ("rounded", {**PUBLISHED_GPT_OSS, "truncate": True})):
        result = export(run_cli, model("gpt_oss", rope_parameters=rope), tmp_path / name)
        assert ("rounds where YaRN begins and ends" in result.stderr) == (name == "between")


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="wants llama-cpp-python, which compiles llama.cpp")
def test_llama_cpp_computes_gpt_oss_as_published_but_for_where_yarn_ends(
    run_cli: Any, model: Any, tmp_path: Path
) -> None:
    source = model("gpt_oss", head_dim=64, rope_parameters=PUBLISHED_GPT_OSS, max_position_embeddings=131072)
    assert export(run_cli, source, tmp_path / "out", "--type", "f32").code == 0
    tokens = torch.randint(288, (200,), generator=torch.Generator().manual_seed(0))
    found = logits_in_llama_cpp(tmp_path / "out" / "model.gguf", tokens)
    between = load(source)(tokens[None]).logits[0]
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["truncate"] = True
    (source / "config.json").write_text(json.dumps(config))
    rounded = load(source)(tokens[None]).logits[0]
    assert (found - rounded).norm() < 1e-4 * rounded.norm()
    assert (found - between).norm() > 1e-3 * between.norm()


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="wants llama-cpp-python, which compiles llama.cpp")
def test_llama_cpp_chooses_the_same_blocks_of_a_text(run_cli: Any, model: Any, tmp_path: Path) -> None:
    """MiniMax-M3 in a text of more blocks than attention sees; llama.cpp chooses some with flash attention alone."""
    sparse = {"layer_types": ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["sparse"] * 3}
    source = model("minimax_m3_vl_text", **sparse, index_topk_blocks=2)
    result = export(run_cli, source, tmp_path / "out", "--type", "f32")
    assert "flash attention" in result.stderr
    tokens = torch.randint(288, (112,), generator=torch.Generator().manual_seed(0))
    expected = load(source)(tokens[None]).logits[0]
    for flash_attn in (True, False):
        found = logits_in_llama_cpp(tmp_path / "out" / "model.gguf", tokens, flash_attn=flash_attn)
        assert ((found - expected).norm() < 1e-4 * expected.norm()) == flash_attn


@pytest.mark.parametrize("name", sampled(CALIBRATED, STRUCTURES))
def test_codes_are_chosen_on_a_text(run_cli: Any, model: Made, tmp_path: Path, tiny_text: Path, name: str) -> None:
    """Also of layers without experts or attention; what nothing is known of the inputs of has the nearest codes."""
    text = "--calibration", tiny_text, "--samples", 2, "--sequence-length", 32
    result = export(run_cli, model(name), tmp_path / "out", *text, "--target-bpw", 9.5)
    assert result.code == 0, result.stderr
    types = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
    }
    assert {"IQ4_NL", "Q5_0", "Q5_1", "Q8_0"} & set(types.values())
    fixed = export(run_cli, model(name), tmp_path / "fixed", *text, "--type", "q4_0")
    assert fixed.code == 0, fixed.stderr
    advice = export(run_cli, model(name), tmp_path / "advice", *text, "--type", "f16", "--target-bpw", 14)
    assert advice.code == 0, advice.stderr
    known = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "advice" / "model.gguf").tensors}
    measured = gguf.GGUFReader(tmp_path / "advice" / "imatrix.gguf").tensors
    assert {tensor.name.rpartition(".")[0] for tensor in measured} <= known


@pytest.mark.parametrize("name", sampled(CALIBRATED, STRUCTURES))
def test_what_llama_quantize_is_told_is_of_tensors_of_the_file(
    run_cli: Any, model: Made, tmp_path: Path, tiny_text: Path, name: str
) -> None:
    text = "--calibration", tiny_text, "--samples", 2, "--sequence-length", 32
    result = export(run_cli, model(name), tmp_path / "out", *text, "--type", "f16", "--target-bpw", 12)
    assert result.code == 0, result.stderr
    wide = {tensor.name: tensor.shape for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    measured = gguf.GGUFReader(tmp_path / "out" / "imatrix.gguf").tensors
    inputs = {tensor.name.removesuffix(".in_sum2"): tensor.shape for tensor in measured if "in_sum2" in tensor.name}
    lines = (tmp_path / "out" / "tensor-types.txt").read_text().splitlines()
    typed = {line.partition("=")[0].strip("^$").replace("\\", "") for line in lines}
    assert typed
    assert typed | inputs.keys() <= wide.keys()
    assert all(inputs[tensor][0] == wide[tensor][0] for tensor in inputs)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}, "groups"),
        ("deepseek_v2", {"num_hidden_layers": 3}, "q_lora_rank"),
        ("deepseek_ocr2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}, "groups"),
        ("deepseek_ocr2", {"rope_parameters": {**TURNED, "rope_theta": 5e4}}, "rope_parameters"),
        ("deepseek_ocr2", {"rope_parameters": YARN}, "rope_parameters"),
        ("deepseek_ocr2", {"num_key_value_heads": 2}, "heads of keys"),
        ("deepseek_ocr2", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "no experts"),
        ("deepseek_ocr2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_ocr2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("unlimited_ocr", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("unlimited_ocr", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("unlimited_ocr", {"attention_bias": True}, "attention_bias"),
        ("afmoe", {"layer_types": [WINDOW, WHOLE] * 2, "global_attn_every_n_layers": 2}, "every 4th layer"),
        ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "no experts"),
        ("lfm2_moe", {"routed_scaling_factor": 1.5}, "routed_scaling_factor"),
        ("kimi_linear", {"linear_num_heads": 2}, "as many heads"),
        ("kimi_linear", {"q_lora_rank": 16}, "q_lora_rank"),
        ("kimi_linear", {"moe_renormalize": False}, "norm_topk_prob"),
        ("kimi_linear", {"rms_norm_eps": 1e-3}, "√(|x|² + 1e-06)"),
        ("bailing_hybrid", {"kda_safe_gate": False}, "kda_safe_gate"),
        ("bailing_hybrid", {"kda_lower_bound": 0.0}, "kda_lower_bound"),
        ("bailing_hybrid", {"q_lora_rank": 16}, "q_lora_rank"),
        ("bailing_hybrid", {"linear_num_heads": 2}, "as many heads"),
        ("bailing_hybrid", {"rms_norm_eps": 1e-4}, "√(|x|² + 1e-06)"),
        ("bailing_hybrid", {"rope_parameters": YARN}, "'yarn'"),
        ("bailing_hybrid", {"attention_bias": True}, "attention_bias"),
        ("bailing_hybrid", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "no experts"),
        ("bailing_hybrid", {"layer_types": [LINEAR] * 4}, "0 have attention"),
        ("dots3_note_text", {"layer_types": [WINDOW] * 4}, "layer_types"),
        ("dots3_note_text", {"use_dsa": False}, "layer_types"),
        ("dots3_note_text", {"swa_q_lora_rank": 8}, "q_lora_rank"),
        ("dots3_note_text", {"shared_experts_intermediate_size": 40}, "shared_experts_intermediate_size"),
        ("dots3_note_text", {"index_head_dim": 48}, "index_head_dim"),
        ("dots3_note_text", {"rope_parameters": YARN}, "rope_parameters"),
        ("deepseek_v4", {"layer_types": [WINDOW] * 4}, "layer_types"),
        ("deepseek_v4", {"compress_rate_csa": 8}, "compress_rates"),
        ("deepseek_v4", {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
        ("deepseek_v4", {"index_head_dim": 48}, "index_head_dim"),
        ("deepseek_v32", {"index_head_dim": 32}, "index_head_dim"),
        ("glm_moe_dsa", {"index_head_dim": 96}, "index_head_dim"),
        ("deepseek_v4", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v4", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("deepseek_v4", {"hc_mult": 2}, "hc_mult"),
        ("deepseek_v4", {"rope_parameters": {"main": HALF_TURNED, "compress": YARN}}, "rope_parameters"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias"),
        ("mimo_v2_flash", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("mimo_v2_flash", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ("mimo_v2_flash", {"rope_parameters": {WHOLE: HALF_TURNED, WINDOW: TURNED}}, "another share"),
        ("laguna", {"layer_types": [WINDOW, WHOLE, WINDOW]}, "another share"),
        ("step3p7", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
        ("step3p7", {"mlp_bias": True}, "mlp_bias"),
        ("minimax_m3_vl_text", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("minimax_m3_vl_text", {"shared_intermediate_size": 40}, "shared_intermediate_size"),
        ("minimax_m3_vl_text", {"index_n_heads": 4}, "index_n_heads"),
        ("minimax_m3_vl_text", {"index_local_blocks": 5}, "index_local_blocks"),
        ("minimax_m3_vl_text", {"rotary_dim": 8}, "rotary_dim"),
        ("minimax_m3_vl_text", {"layer_types": [WHOLE] * 3}, "layer_types"),
        ("minimax", {"mlp_alpha_factor": 1.2}, "residual"),
        ("minimax", {"mlp_beta_factor": 0.5}, "beta_factor"),
        ("minimax", {"rotary_dim": 4}, "rotary_dim"),
        ("minimax", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ("minimax", {"layer_types": [LINEAR] * 3}, "lightning"),
        (
            "mellum",
            {"rope_parameters": {WHOLE: TURNED, WINDOW: {**TURNED, "rope_type": "linear", "factor": 2.0}}},
            "linear",
        ),
        ("exaone_moe", {"layer_types": [WHOLE] * 3}, "wants windows"),
        ("granitemoe_swa", {"layer_rope_theta": [0.0, 1e4, 2e4]}, "layer_rope_theta"),
        ("granitemoe_swa", {"layer_rope_theta": [0.0] * 3}, "layer_rope_theta"),
        ("qwen4_exp_text", {"output_gate_type": None}, "output_gate_type"),
        ("qwen4_exp_text-ngrams", {"ple_layer_ids": [1, 2]}, "ple_layer_ids"),
        ("qwen4_exp_text-ngrams", {"ple_embed_dim": 64}, "ple_embed_dim"),
        ("qwen4_exp_text", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ("qwen4_exp_text", {"layer_types": [WHOLE] * 3}, "0 of 3 layers carry a state"),
        ("qwen3_5_moe_text", {"rope_parameters": {**TURNED, "mrope_section": [4, 2, 2]}}, "mrope_section"),
        ("qwen3_next", {"linear_value_head_dim": 16}, "linear_value_head_dim"),
        ("qwen3_next", {"layer_types": [LINEAR] * 3}, "0 have attention"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 3}, "0 of 3 layers carry a state"),
        ("lfm2_moe", {"layer_types": ["conv"] * 3}, "0 have attention"),
        ("glm5_next", {"linear_num_heads": 2}, "linear_num_heads"),
        ("glm5_next", {"hc_mult": 2}, "hc_mult"),
        ("glm5_next", {"index_kpool": 1}, "index_kpool"),
        ("glm5_next", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ("hy_v4", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("hy_v4", {"index_head_dim": 8}, "index_head_dim"),
        ("hy_v4", {"indexer_types": ["shared", "full", "full"]}, "first layer"),
        ("hy_v4", {"rope_parameters": {**TURNED, "rope_type": "yarn", "factor": 8.0}}, "'yarn'"),
        ("granitemoehybrid", {"time_step_limit": (0.01, 0.1)}, "time_step_limit"),
        ("granitemoehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias"),
        ("jamba", {"mamba_expand": 3}, "mamba_expand"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear"),
        (
            "glm_moe_dsa",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                }
            },
            "mscale_all_dim",
        ),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    WHOLE: {"rope_type": "default", "rope_theta": 1e4},
                    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "default",
        ),
        (
            "mellum",
            {
                "rope_parameters": {
                    WHOLE: {"rope_type": "default", "rope_theta": 1e4},
                    WINDOW: {"rope_type": "default", "rope_theta": 1e5},
                }
            },
            "another base",
        ),
        ("sarvam_moe", {"n_shared_experts": 2}, "n_shared_experts"),
        ("gemma4_text-sharing", {"layer_types": [WHOLE, WINDOW] * 2}, "last layer that has some"),
        ("gemma4_text-sharing", {"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input"),
        ("gemma4_text-sharing", {"use_double_wide_mlp": True}, "use_double_wide_mlp"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
        ("gemma2", {"layer_types": [WHOLE] * 4}, "wants windows"),
        ("gemma2-largest", {"query_pre_attn_scalar": 16}, "√8"),
        ("gemma3-stretched", {"rope_parameters": {WHOLE: YARN, WINDOW: TURNED}}, "'yarn'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("smollm3", {"no_rope_layers": [1] * 5}, "no_rope_layers"),
        ("smollm3", {"mlp_bias": True}, "no place"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere2", {"layer_types": [WHOLE] * 3}, "wants windows"),
        ("exaone4", {"sliding_window": 8}, "64 layers"),
        ("exaone4-largest", {"sliding_window": None}, "64 layers"),
        ("ministral3", {"rope_parameters": {**TURNED, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("olmo2", {"rope_parameters": LONG_ROPE}, "longrope"),
        ("olmo3", {"rope_parameters": {WHOLE: TURNED, WINDOW: {**TURNED, "rope_theta": 5e3}}}, "another base"),
        ("starcoder2", {"use_bias": False}, "use_bias"),
        ("lfm2_moe", {"head_dim": 12}, "4 heads of 12 do not add up to the hidden size of 32"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act"),
        ("arcee", {"mlp_bias": True}, "mlp_bias"),
        ("falcon", {"alibi": True}, "alibi"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ("granitemoehybrid-attention", {"position_embedding_type": None}, "position_embedding_type"),
        ("falcon_h1-normed", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon_h1", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
        ("falcon_h1", {"time_step_limit": (0.01, 0.1)}, "time_step_limit"),
        ("mpt", {"attn_config": {"alibi": False}}, "(alibi)"),
        ("mpt", {"attn_config": {"softmax_scale": 0.25}}, "softmax_scale"),
        ("internlm3", {"rope_parameters": LONG_ROPE}, "longrope"),
        ("deepseek_v2", {"n_shared_experts": 0}, "no shared expert"),
        ("glm4_moe", {"n_shared_experts": 0}, "no shared expert"),
        ("solar_open", {"n_shared_experts": 0}, "no shared expert"),
        ("kimi_linear", {"num_shared_experts": 0}, "no shared expert"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "no shared expert"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    run_cli: Any, model: Any, tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    result = export(run_cli, model(name, **changes), tmp_path / "out")
    assert result.code == 3
    assert said in result.stderr
    assert not (tmp_path / "out" / "model.gguf").exists()


def test_a_shared_expert_without_neurons_is_refused_where_it_is_not_stored_either(
    run_cli: Any, model: Any, tmp_path: Path
) -> None:
    path = model("deepseek_v3", n_shared_experts=0)
    save_file({name: one for name, one in tensors_of(path).items() if one.numel()}, path / "model.safetensors")
    result = export(run_cli, path, tmp_path / "out")
    assert result.code == 3
    assert "no shared expert" in result.stderr


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_more_tokens_are_left_out(run_cli: Any, model: Any, tmp_path: Path, name: str) -> None:
    """As the hub's files have them, behind the last; llama.cpp does not compute with them."""
    own, more = model(name, num_nextn_predict_layers=1), model(name, num_nextn_predict_layers=1)
    add_prediction_layer(more)
    files = []
    for number, path in enumerate((own, more)):
        result = export(run_cli, path, tmp_path / str(number), "--type", "f32")
        assert result.code == 0, result.stderr
        files.append((tmp_path / str(number) / "model.gguf").read_bytes())
    assert len(files[0]) == len(files[1])


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight"),
        ("ernie4_5_moe", "model.mtp_emb_norm.0.weight"),
        ("mimo_v2_flash", "model.mtp.layers.0.input_layernorm.weight"),
        ("qwen3_next", "mtp.norm.weight"),
    ],
)
def test_layers_that_predict_more_tokens_are_known_by_name(
    run_cli: Any, model: Made, tmp_path: Path, name: str, further: str
) -> None:
    source = copy_of(model(name), tmp_path / "source")
    save_file({**tensors_of(source), further: torch.ones(32)}, source / "model.safetensors", {"format": "pt"})
    result = export(run_cli, source, tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr


@pytest.mark.parametrize(("name", "base", "mask"), [("gpt2", "transformer.", "attn"), ("gpt_neox", "", "attention")])
def test_decoders_of_the_hub_lie_bare_and_have_masks(
    run_cli: Any, model: Made, tmp_path: Path, name: str, base: str, mask: str
) -> None:
    source, files = copy_of(model(name), tmp_path / "source"), list[bytes]()
    tensors = {own.removeprefix(base): tensor for own, tensor in tensors_of(source).items()}
    first = next(own for own in tensors if ".0." in own).partition(".0.")[0]
    for buffer in ("bias", "masked_bias"):
        tensors[f"{first}.0.{mask}.{buffer}"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for path, out in ((model(name), "own"), (source, "hub")):
        result = export(run_cli, path, tmp_path / out, "--type", "f32")
        assert result.code == 0, result.stderr
        reader = gguf.GGUFReader(tmp_path / out / "model.gguf")
        files.append(b"".join(tensor.name.encode() + tensor.data.tobytes() for tensor in reader.tensors))
    assert files[0] == files[1]


def as_published(path: Path) -> None:
    """Give a model the entries and names that the hub's files of its family have."""
    config = config_of(path)
    if config["model_type"] == "dots3_note":
        text = config.pop("text_config")
        (path / "config.json").write_text(json.dumps({**text, **config}))
        return
    if config["model_type"] == "unlimited_ocr":
        text = config.pop("text_config")
        dense = text.pop("mlp_layer_types").count("dense")
        window = {key: text.pop(key) for key in ("layer_types", "sliding_window")}["sliding_window"]
        text |= {"first_k_dense_replace": dense, "use_mla": False}
        (path / "config.json").write_text(json.dumps({**config, "language_config": text, "sliding_window": window}))
        return
    if config["model_type"] == "bailing_hybrid":
        _as_published_ling(path, config)
        return
    kinds = [key for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads") if key in config]
    layers = {key: config.pop(key) for key in (*kinds, "linear_conv_kernel_dim")}
    kda, full = (
        [n for n, kind in enumerate(layers["layer_types"], 1) if (kind == WHOLE) == is_whole]
        for is_whole in (False, True)
    )
    config |= {
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": kda,
            "head_dim": layers["linear_head_dim"],
            "num_heads": layers["linear_num_heads"],
            "short_conv_kernel_size": layers["linear_conv_kernel_dim"],
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): own for name, own in tensors_of(path).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _as_published_ling(path: Path, config: dict[str, Any]) -> None:
    kinds = config.pop("layer_types")
    derived = ("mlp_layer_types", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim")
    config = {key: value for key, value in config.items() if key not in derived} | {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "head_dim": config["linear_head_dim"],
        "layer_group_size": kinds.index(WHOLE) + 1,
        "norm_topk_prob": config["moe_renormalize"],
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.5},
    }
    (path / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "linear_head_dim"}))
    tensors = tensors_of(path)
    for layer, kind in enumerate(kinds):
        if kind == LINEAR:
            start = f"model.layers.{layer}.attention"
            tensors[f"{start}.o_proj.weight"] = tensors.pop(f"{start}.dense.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "dots3_note", "unlimited_ocr"])
def test_published_configs_give_the_same_file(run_cli: Any, model: Made, tmp_path: Path, name: str) -> None:
    source = copy_of(model(name), tmp_path / "source")
    as_published(source)
    for path, out in ((model(name), "own"), (source, "published")):
        result = export(run_cli, path, tmp_path / out, "--type", "f32")
        assert result.code == 0, result.stderr
    own, published = (gguf.GGUFReader(tmp_path / out / "model.gguf") for out in ("own", "published"))
    names = {key for key in own.fields if not key.startswith("general.")}
    assert {key: own.fields[key].contents() for key in names} == {
        key: published.fields[key].contents() for key in published.fields if not key.startswith("general.")
    }
    assert {one.name: one.data.tobytes() for one in own.tensors} == {
        one.name: one.data.tobytes() for one in published.tensors
    }


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid-weights"])
def test_a_little_that_is_added_elsewhere_is_a_note(run_cli: Any, model: Any, tmp_path: Path, name: str) -> None:
    result = export(run_cli, model(name, rms_norm_eps=1e-5), tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    assert "rms_norm_eps" in result.stderr
    assert ("expert_swiglu_limit_list" in result.stderr) == (name != "kimi_linear")


class _Bounded(torch.nn.Module):
    """A layer's experts with bounds, on what their gate becomes and on what it is multiplied with."""

    def __init__(self, block: Any, limits: tuple[float | None, float | None]) -> None:
        super().__init__()
        self.block, self.limits = block, [limit or torch.inf for limit in limits]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        def bounded(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
            return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

        routed, shared = self.limits
        tokens, own, experts = inputs.flatten(0, -2), self.block.shared_experts, self.block.experts
        _, weights, chosen = self.block.gate(tokens)
        outputs = own.down_proj(bounded(own.gate_proj(tokens), own.up_proj(tokens), shared))
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            outputs = outputs + weight * (bounded(*(tokens @ gate_up.T).chunk(2, -1), routed) @ down.T)
        return outputs.view_as(inputs)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="wants llama-cpp-python, which compiles llama.cpp")
def test_llama_cpp_bounds_activations_as_a_config_says(run_cli: Any, model: Any, tmp_path: Path) -> None:
    """transformers has no bounds here, and published models have some in their last layers."""
    routed, shared = [0.0, 0.05, None, 0.02], [0.01, 0.0, 0.03]
    source = model("bailing_hybrid", expert_swiglu_limit_list=routed, share_expert_swiglu_limit_list=shared)
    result = export(run_cli, source, tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    tokens = torch.randint(288, (48,), generator=torch.Generator().manual_seed(0))
    found, bounded = logits_in_llama_cpp(tmp_path / "out" / "model.gguf", tokens), load(source)
    unbounded = bounded(tokens[None]).logits[0]
    for layer, limits in zip(bounded.model.layers[1:], zip(routed[1:], [*shared[1:], None], strict=True), strict=True):
        layer.mlp = _Bounded(layer.mlp, limits)
    expected = bounded(tokens[None]).logits[0]
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert (found - unbounded).norm() > 1e-2 * unbounded.norm()


def test_the_language_model_alone_is_written_of_one_that_sees(run_cli: Any, model: Made, tmp_path: Path) -> None:
    result = export(run_cli, model("qwen3_vl_moe"), tmp_path / "out", "--type", "f32")
    assert "mmproj" in result.stderr
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["qwen3vlmoe.n_deepstack_layers"].contents() == 2
    assert fields["qwen3vlmoe.rope.dimension_sections"].contents() == [2, 1, 1, 0]


def test_who_makes_the_file_with_the_part_that_sees(run_cli: Any, model: Made, tmp_path: Path) -> None:
    for name in ("gemma3/gemma3", "llava/llama"):
        result = export(run_cli, model(name), tmp_path / name, "--type", "f32")
        assert result.code == 0, result.stderr
        assert "the language model alone" in result.stderr
        assert ("convert_hf_to_gguf.py --mmproj" in result.stderr) == name.startswith("gemma3")


def test_logits_that_a_class_around_a_language_model_leaves_as_they_are_are_a_note(
    run_cli: Any, model: Made, tmp_path: Path
) -> None:
    """LLaVA with Granite: transformers forgets by what its logits are divided."""
    result = export(run_cli, model("llava/granite"), tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    assert "(logits_scaling)" in result.stderr
    assert "(logits_scaling)" not in export(run_cli, model("llava/llama"), tmp_path / "other", "--type", "f32").stderr


def test_a_model_within_that_llama_cpp_turns_otherwise_is_refused(run_cli: Any, model: Made, tmp_path: Path) -> None:
    result = export(run_cli, model("hunyuan_vl/hunyuan_vl_text"), tmp_path / "out")
    assert result.code == 3
    assert "three of its four axes" in result.stderr


@pytest.mark.parametrize("name", ["iquestcoder", "mistral3/mistral"])
def test_a_head_that_differs_from_embeddings_is_kept_whatever_a_config_says(
    run_cli: Any, model: Any, tmp_path: Path, name: str
) -> None:
    """transformers ties no matrices that are both there and differ; Mistral Small's config says that they are tied."""
    source = copy_of(model(name, tie_word_embeddings=False), tmp_path / "source")
    config = config_of(source)
    config["tie_word_embeddings"] = True
    (source / "config.json").write_text(json.dumps(config))
    result = export(run_cli, source, tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    [head] = [tensor for key, tensor in tensors_of(source).items() if key.endswith("lm_head.weight")]
    assert (tensors["output.weight"] == head.numpy()).all()


def test_what_a_config_leaves_out_around_a_language_model(run_cli: Any, model: Made, tmp_path: Path) -> None:
    """The file says what transformers takes there."""
    source = copy_of(model("qwen4_exp"), tmp_path / "source")
    config = config_of(source)
    del config["image_token_id"]
    (source / "config.json").write_text(json.dumps(config))
    assert export(run_cli, source, tmp_path / "out", "--type", "f32").code == 0
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["qwen4exp.ple.image_token_id"].contents() == Qwen4ExpConfig().image_token_id


@pytest.mark.parametrize("name", ["gpt_oss", "dots1", "exaone_moe", "mellum", "mimo_v2_flash", "minimax_m2"])
def test_tied_embeddings_are_there_twice_where_llama_cpp_wants_a_head(
    run_cli: Any, model: Any, tmp_path: Path, name: str
) -> None:
    result = export(run_cli, model(name, tie_word_embeddings=True), tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert (tensors["output.weight"] == tensors["token_embd.weight"]).all()


def test_what_differs_slightly_is_said(run_cli: Any, model: Any, tmp_path: Path) -> None:
    """MiniMax-01 as transformers makes it by default: llama.cpp has one epsilon for all norms."""
    result = export(run_cli, model("minimax", rms_norm_eps=1e-5), tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    assert "adds 1e-05" in result.stderr


def test_names_of_hy_v4_are_the_hubs_or_those_of_transformers(run_cli: Any, model: Any, tmp_path: Path) -> None:
    """transformers saves it under other names than it was published with, and reads both."""
    source = model("hy_v4", indexer_types=["full", "shared", "shared"])
    assert "small vectors" in export(run_cli, source, tmp_path / "saved", "--type", "f32").stderr
    published = copy_of(source, tmp_path / "published")
    tensors = tensors_of(source)
    for here, there in (
        (r"hc_pre\.(hc_(attn|mlp)_layer)", r"\1.hc_pre"),
        (r"hc_pre\.hc_head", "hc_head"),
        (r"(mlp\S*)\.linear_gate", r"\1.gate_proj"),
    ):
        tensors = {re.sub(here, there, name): tensor for name, tensor in tensors.items()}
    assert len(tensors.keys() - tensors_of(source).keys()) == 3 + 3 * 6 + 3
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    result = export(run_cli, published, tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    saved, out = (gguf.GGUFReader(tmp_path / name / "model.gguf").tensors for name in ("saved", "out"))
    assert [tensor.name for tensor in saved] == [tensor.name for tensor in out]
    assert all((one.data == other.data).all() for one, other in zip(saved, out, strict=True))


def test_what_llama_cpp_takes_for_another_in_long_texts_is_a_note(run_cli: Any, model: Made, tmp_path: Path) -> None:
    long = export(run_cli, model("phi3-long"), tmp_path / "long")
    assert "a context of more than 32 tokens" in long.stderr
    assert "by tanh" in export(run_cli, model("gpt_neox"), tmp_path / "gelu").stderr
    assert "by tanh" not in export(run_cli, model("gpt_neox-sequential"), tmp_path / "other").stderr


def test_what_transformers_takes_for_another_is_a_note(run_cli: Any, model: Any, tmp_path: Path) -> None:
    """MPT's ALiBi, which transformers does not take from the config, and rotary embeddings that stretch with a text."""
    steep = export(run_cli, model("mpt", attn_config={"alibi_bias_max": 16}), tmp_path / "steep")
    assert "(alibi_bias_max = 16)" in steep.stderr
    fields = gguf.GGUFReader(tmp_path / "steep" / "model.gguf").fields
    assert fields["mpt.attention.max_alibi_bias"].contents() == 16
    usual = export(run_cli, model("mpt"), tmp_path / "usual").stderr
    assert "by tanh" in usual
    assert "alibi_bias_max" not in usual
    assert "more than 128 tokens" in export(run_cli, model("internlm3-dynamic"), tmp_path / "dynamic").stderr


def test_more_tokens_than_pointed_out_are_a_note(run_cli: Any, model: Made, tmp_path: Path) -> None:
    """llama.cpp takes as many tokens, of whole blocks or not, as the most that transformers takes."""
    assert "up to 3 tokens more" in export(run_cli, model("qwen4_exp_text"), tmp_path / "blocks").stderr
    assert "longer texts" not in export(run_cli, model("qwen4_exp_text-sparse"), tmp_path / "single").stderr


def test_a_window_of_answers_is_a_note(run_cli: Any, model: Any, tmp_path: Path) -> None:
    """llama.cpp attends to all of an answer; the window is in the file, as its own converter has it."""
    whole = model("unlimited_ocr", layer_types=[WHOLE] * 3)
    for number, (source, window) in enumerate(((model("unlimited_ocr"), 16), (whole, None))):
        result = export(run_cli, source, tmp_path / str(number), "--type", "f32")
        assert ("the last 16 tokens" in result.stderr) == (window is not None)
        assert "--context-shift" in result.stderr
        assert "longer texts" not in result.stderr
        field = gguf.GGUFReader(tmp_path / str(number) / "model.gguf").get_field(
            "deepseek2-ocr.attention.sliding_window"
        )
        assert (field and field.contents()) == window


def test_heads_of_queries_may_differ_by_layer(run_cli: Any, model: Any, tmp_path: Path) -> None:
    result = export(run_cli, model("laguna-heads"), tmp_path / "out", "--type", "q8_0")
    assert result.code == 0, result.stderr
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["laguna.attention.head_count"].contents() == [2, 4, 4]


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe", "nemotron_h"])
def test_a_head_is_left_out_only_where_transformers_ties_it(
    run_cli: Any, model: Any, tmp_path: Path, name: str
) -> None:
    """What the config of the whole model says counts, not that of the language model in it; Nemotron-H never ties."""
    source = model(name, tie_word_embeddings=True)
    result = export(run_cli, source, tmp_path / "out", "--type", "f32")
    assert result.code == 0, result.stderr
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert (tensors["output.weight"] == tensors_of(source)["lm_head.weight"].numpy()).all()


def test_experts_that_are_published_in_mxfp4_stay_as_they_are(
    run_cli: Any, model: Any, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    stored = save_mxfp4(model("gpt_oss", intermediate_size=32), tmp_path / "stored")
    tiny_tokenizer.save_pretrained(stored)
    assert "--experts-type mxfp4" in export(run_cli, stored, tmp_path / "wide", "--type", "f32").stderr
    result = export(run_cli, stored, tmp_path / "out", "--type", "q8_0", "--experts-type", "mxfp4")
    assert result.code == 0, result.stderr
    wide, kept = (gguf.GGUFReader(tmp_path / name / "model.gguf").tensors for name in ("wide", "out"))
    before = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in wide}
    experts = [tensor for tensor in kept if tensor.tensor_type.name == "MXFP4"]
    assert len(experts) == 12
    for tensor in experts:
        assert (gguf.quants.dequantize(tensor.data, tensor.tensor_type) == before[tensor.name]).all()


def test_a_tokenizer_of_pieces_keeps_its_merges_where_llama_cpp_reads_them(
    run_cli: Any, model: Any, tmp_path: Path
) -> None:
    path = model("gemma4_text", vocab_size=266)
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab"]
    merges = [("a", "b"), ("▁", "ab")]
    inner = Tokenizer(BPE({piece: token for token, piece in enumerate([*pieces, "▁ab"])}, merges, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>").save_pretrained(path)
    assert export(run_cli, path, tmp_path / "out").code == 0
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gemma4"
    assert fields["tokenizer.ggml.merges"].contents() == ["a b", "▁ ab"]
    assert not fields["tokenizer.ggml.add_space_prefix"].contents()


@pytest.mark.parametrize("changed", ["Lowercase", "add_prefix_space"])
def test_a_tokenizer_that_changes_a_text_is_refused(
    run_cli: Any, model: Made, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, changed: str
) -> None:
    """Also for a family whose published tokenizers have a name in llama.cpp; with `--pre-tokenizer` users say so."""
    source, tokenizer = copy_of(model("deepseek_v3"), tmp_path / "source"), copy.deepcopy(tiny_tokenizer)
    if changed == "Lowercase":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    else:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save_pretrained(source)
    result = export(run_cli, source, tmp_path / "out")
    assert result.code == 3
    assert changed in result.stderr
    assert export(run_cli, source, tmp_path / "out", "--pre-tokenizer", "gpt-2").code == 0


def test_the_name_of_a_familys_tokenizers_is_a_note_where_rules_have_none(
    run_cli: Any, model: Made, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    source, tokenizer = copy_of(model("deepseek_v3"), tmp_path / "source"), copy.deepcopy(tiny_tokenizer)
    assert "published tokenizers" not in export(run_cli, source, tmp_path / "known").stderr
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[a-z]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save_pretrained(source)
    assert "'deepseek-v3', as in this family's published" in export(run_cli, source, tmp_path / "out").stderr
    chosen = export(run_cli, source, tmp_path / "chosen", "--pre-tokenizer", "gpt-2")
    assert "published tokenizers" not in chosen.stderr


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("deepseek-v3", ["123", "45", "北京", "go", " don", "'t"]),
        ("kimi-k2", ["123", "45", "北京", "go", " don't"]),
        ("glm4", ["123", "45", "北京go", " don", "'t"]),
        ("qwen35", ["1", "2", "3", "4", "5", "北京go", " don", "'t"]),
        ("bloom", ["12345北京go", " don't"]),
        ("falcon", ["123", "45", "北京go", " don", "'", "t"]),
    ],
)
def test_the_tokenizer_of_a_file_cuts_a_text_as_its_name_says(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pieces: list[str]
) -> None:
    """transformers takes these names for GPT-2's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    export(run_cli, model("deepseek_v3"), tmp_path / "out", "--pre-tokenizer", name)
    file, text = tmp_path / "out" / "model.gguf", "12345北京go don't"
    tokenizer = load_tokenizer(Checkpoint.open(file).path).backend_tokenizer
    places = [place for _, place in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in places] == pieces


def test_a_way_to_cut_a_text_that_moetool_does_not_know_is_told(
    run_cli: Any, model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    export(run_cli, model("deepseek_v3"), tmp_path / "out", "--pre-tokenizer", "afmoe")
    caplog.clear()
    Checkpoint.open(tmp_path / "out" / "model.gguf")
    assert "does not know the rules (afmoe)" in caplog.text


def test_time_steps_that_llama_cpp_does_not_bound_are_a_note(run_cli: Any, model: Made, tmp_path: Path) -> None:
    assert "time_step_min = 0.001" in export(run_cli, model("nemotron_h"), tmp_path / "out").stderr
    assert "time_step_min" not in export(run_cli, model("granitemoehybrid"), tmp_path / "other").stderr


def test_a_file_that_is_only_written_is_refused_as_an_input(run_cli: Any, model: Made, tmp_path: Path) -> None:
    export(run_cli, model("minimax"), tmp_path / "out")
    result = run_cli("inspect", tmp_path / "out" / "model.gguf")
    assert result.code == 3
    assert "moetool reads" in result.stderr
