"""`eval`, `inspect`, `verify`, `export`, `list` and `--help`, as a user sees them."""

import math
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from checkpoints import (
    COMMAND_LINE,
    change_config,
    change_tensors,
    config_of,
    contents,
    copy_of,
    load,
    logits,
    python,
    weight_bytes,
    weights,
)
from torch.nn import functional as F

from moetool.checkpoint.header import read_header

# What the command line must not import before a command runs.
HEAVY = ("torch", "transformers", "datasets", "numpy", "scipy", "accelerate")


# -- eval


def perplexity_by_hand(path: Path, stream: torch.Tensor, length: int) -> tuple[float, int]:
    """Mean loss over the `length − 1` predictions of every consecutive window, and the number of windows."""
    windows = stream[: len(stream) // length * length].view(-1, length)
    model = load(path)
    losses = []
    with torch.inference_mode():
        for window in windows:
            predicted = model(input_ids=window[None]).logits[0, :-1]
            losses.append(F.cross_entropy(predicted.double(), window[1:], reduction="sum").item())
    return math.fsum(losses) / (len(windows) * (length - 1)), len(windows)


@pytest.mark.parametrize("which", ["tiny_mixtral", "small"])
def test_eval_follows_the_protocol(request, run_cli, tiny_text, tiny_tokens, tmp_path, which):
    path, text = request.getfixturevalue(which), tmp_path / "text.txt"
    text.write_text(tiny_text.read_text()[:6000])
    told = run_cli("eval", path, "--data", text, "--sequence-length", 48, "--batch-tokens", 200, "--json").json
    tokens = tiny_tokens[: told["tokens"]]  # the tokens of a beginning are the beginning of the tokens, up to the cut
    nll, windows = perplexity_by_hand(path, tokens, 48)
    assert told["windows"] == windows > 20
    assert told["tokens"] == 48 * windows
    assert told["nll"] == pytest.approx(nll, abs=1e-5)
    assert told["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)


def test_eval_does_not_depend_on_batches(run_cli, small, tiny_text):
    arguments = ("eval", small, "--data", tiny_text, "--sequence-length", 32, "--windows", 50, "--json")
    told = [run_cli(*arguments, "--batch-tokens", count).json["nll"] for count in (1, 100, 100_000)]
    assert told == pytest.approx([told[0]] * 3, abs=1e-6)


def test_eval_of_decomposed_is_that_of_the_source(run_cli, decomposed, tiny_mixtral, tiny_text):
    options = ("--data", tiny_text, "--sequence-length", 64, "--windows", 40, "--json")
    results = [run_cli("eval", path, *options).json for path in (tiny_mixtral, decomposed)]
    assert results[0]["windows"] == results[1]["windows"] == 40
    assert results[0]["nll"] == pytest.approx(results[1]["nll"], abs=1e-6)


def test_eval_for_people(run_cli, small, tiny_text):
    result = run_cli("eval", small, "--data", tiny_text, "--sequence-length", 64, "--windows", 5)
    assert result.code == 0
    assert "5 windows of 64 tokens" in result.stdout
    assert re.search(r"^perplexity +\d+\.\d{4}$", result.stdout, re.M)
    assert "Evaluate" in result.stderr
    result = run_cli("eval", small, "--data", tiny_text, "--sequence-length", 64, "--windows", 1)
    assert "one window of 64 tokens" in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ((), 2, "--data"),
        (("--data", "/no/such.txt", "--sequence-length", 64), 3, "/no/such.txt"),
        (("--data", "TEXT", "--sequence-length", 129), 2, "context of 128"),
        (("--data", "TEXT", "--sequence-length", 1), 2, "--sequence-length"),
        (("--data", "TEXT", "--compute-dtype", "int8"), 2, "bfloat16"),
        (("--data", "TEXT", "--sequence-length", 64, "--device", "toaster"), 2, "toaster"),
        (("--data", "TEXT@2", "--sequence-length", 64), 2, "@weights"),
    ],
)
def test_eval_refuses(run_cli, tiny_mixtral, tiny_text, options, code, word):
    options = [str(option).replace("TEXT", str(tiny_text)) for option in options]
    result = run_cli("eval", tiny_mixtral, *options, "--json")
    assert result.code == code
    assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_eval_of_a_model_that_predicts_nothing(run_cli, tiny_mixtral, tiny_text, tmp_path):
    def damage(tensors):
        tensors["model.norm.weight"][0] = torch.nan

    broken = change_tensors(copy_of(tiny_mixtral, tmp_path / "broken"), damage)
    result = run_cli("eval", broken, "--data", tiny_text, "--sequence-length", 64, "--windows", 2)
    assert result.code == 5
    assert "damaged" in result.stderr


# -- inspect


@pytest.mark.parametrize("which", ["tiny_mixtral", "small", "decomposed"])
def test_inspect_counts(request, run_cli, which):
    path = request.getfixturevalue(which)
    told = run_cli("inspect", path, "--json").json
    expected = {
        "model_type": "mixtral",
        "architecture": "Mixtral",
        "layers": 3,
        "moe_layers": 3,
        "experts": 4,
        "top_k": 2,
        "bytes": weight_bytes(path),
        "dtype": "float32",
    }
    assert {key: told[key] for key in expected} == expected
    dense = sum(parameter.numel() for parameter in load(request.getfixturevalue("tiny_mixtral")).parameters())
    expert = 3 * 32 * 48
    assert told["parameters"]["total"] == dense
    assert told["parameters"]["active"] == dense - 3 * 2 * expert
    infos = read_header(path / "model.safetensors").tensors.values()
    assert told["parameters"]["stored"] == sum(math.prod(info.shape) for info in infos)
    assert [layer["layer"] for layer in told["moe"]] == [0, 1, 2]


def test_inspect_of_a_dense_model(run_cli, dense):
    path = dense("llama")
    told = run_cli("inspect", path, "--json").json
    assert (told["architecture"], told["layers"], told["moe_layers"], told["experts"]) == ("Llama", 3, 0, 0)
    assert (told["hidden_size"], told["intermediate_size"], told["dtype"]) == (32, 48, "float32")
    assert told["parameters"]["total"] == sum(parameter.numel() for parameter in load(path).parameters())
    assert told["bytes"] == weight_bytes(path)
    assert {"upcycle", "moefy", "tune", "export --format gguf", "eval", "verify"} <= set(told["commands"])
    shown = run_cli("inspect", path)
    assert "width         hidden 32, intermediate 48, float32" in shown.stdout
    assert f"next: moetool upcycle {path}" in shown.stderr
    assert "--analysis is of experts" in run_cli("inspect", path, "--analysis").stderr
    encoder = run_cli("inspect", dense("bert"), "--json").json["commands"]
    assert "moefy" in encoder
    assert not {"tune", "generate"} & set(encoder)


def test_inspect_of_a_damaged_dense_model_is_refused(run_cli, dense, tmp_path):
    broken = change_config(copy_of(dense("llama"), tmp_path / "broken"), intermediate_size=64)
    result = run_cli("inspect", broken)
    assert result.code == 3
    assert "config.json promises" in result.stderr


@pytest.mark.parametrize(("options", "kind"), [(("--ratio", 0.35), "low-rank"), (("--rank", 32), "dense")])
def test_inspect_names_ranks_and_errors(run_cli, compress, tiny_mixtral, options, kind):
    """Also where factors would not be smaller than the matrix, which is stored instead."""
    made = compress(tiny_mixtral, *options)
    small = made.path
    told = run_cli("inspect", small, "--json").json
    assert told["ratio"] == pytest.approx(made.told["achieved_ratio"], abs=0.0005)
    assert any(spec.startswith(kind) for layer in told["moe"] for role in layer["lost_energy"] for spec in layer[role])
    tensors = read_header(small / "model.safetensors").tensors
    for layer in told["moe"]:
        assert layer["representation"] == "shared-base"
        assert layer["base_channels"] == 48
        assert all((layer[role] == "native") == (role not in layer["lost_energy"]) for role in ("gate", "up", "down"))
        for role in layer["lost_energy"]:
            for expert, (spec, error) in enumerate(zip(layer[role], layer["lost_energy"][role], strict=True)):
                name = f"model.layers.{layer['layer']}.block_sparse_moe.experts.moetool.{expert}.{role}"
                if spec == "dense":
                    assert tensors[f"{name}.matrix"].shape
                    assert error == 0
                elif spec == "low-rank:0":
                    assert f"{name}.u" not in tensors
                    assert error == 1
                else:
                    assert spec == f"low-rank:{tensors[f'{name}.u'].shape[1]}"
                    assert 0 < error < 1


def test_inspect_of_an_untouched_model(run_cli, tiny_mixtral):
    told = run_cli("inspect", tiny_mixtral, "--json").json
    assert told["ratio"] == 0
    assert told["recipe"] is None
    assert {layer["representation"] for layer in told["moe"]} == {"native"}


def test_inspect_for_people(run_cli, small, tiny_mixtral):
    result = run_cli("inspect", small)
    assert result.code == 0
    for line in (
        r"^model +" + re.escape(str(small)),
        r"^architecture +Mixtral \(softmax",
        r"^layers +3, of which 3 with experts",
        r"^experts +4, top-2, float32",
        r"^parameters +[\d,]+ total \([\d,]+ in the files\), [\d,]+ active, [\d.]+ bits each",
        r"3[45]\.\d\d% smaller",
        r"gate.*up.*down.*base channels",
        r"rank \d+ … \d+, mean \d+",
        r"^│ 2 +│.* 48 │",
    ):
        assert re.search(line, result.stdout, re.M), line
    assert result.stderr.splitlines() == [f"next: moetool report {small}"]
    assert "base channels" not in run_cli("inspect", tiny_mixtral).stdout


# -- verify


def test_verify_of_a_sound_checkpoint(run_cli, small, tiny_mixtral):
    assert run_cli("verify", small).stdout.endswith("ok\n")
    result = run_cli("verify", small, "--against", tiny_mixtral)
    assert result.code == 0
    assert "bit for bit" in result.stdout
    told = run_cli("verify", small, "--against", tiny_mixtral, "--json").json
    assert told["tensors"] == len(read_header(small / "model.safetensors").tensors)
    errors = [error for layer in told["relative_error"].values() for error in layer.values()]
    assert len(errors) == 9
    assert all(0 <= error < 1 for error in errors)
    assert any(errors)
    assert run_cli("verify", tiny_mixtral, "--against", tiny_mixtral).code == 0


def flip(path: Path, name: str) -> Path:
    """Flip the lowest bit of a tensor's last byte but three: another number, and nothing else."""
    info = read_header(path / "model.safetensors").tensors[name]
    data = bytearray((path / "model.safetensors").read_bytes())
    data[info.offset + info.nbytes - 4] ^= 1
    (path / "model.safetensors").write_bytes(data)
    return path


def test_verify_finds_one_flipped_bit(run_cli, small, tiny_mixtral, tmp_path):
    broken = flip(copy_of(small, tmp_path / "broken"), "model.layers.1.self_attn.q_proj.weight")
    alone = run_cli("verify", broken)
    assert alone.code == 5
    assert "model.safetensors is not the file that was written" in alone.stderr
    result = run_cli("verify", broken, "--against", tiny_mixtral, "--json")
    assert result.code == 5
    assert "model.layers.1.self_attn.q_proj.weight differs" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.block_sparse_moe.experts.0.w2.weight"])
def test_verify_finds_what_is_no_number(run_cli, small, tmp_path, name, value):
    broken = change_tensors(copy_of(small, tmp_path / "broken"), lambda t: t[name].view(-1)[-1:].fill_(value))
    result = run_cli("verify", broken)
    assert result.code == 5
    assert f"{name} holds NaN or infinity" in result.stderr


def test_verify_finds_a_lost_tensor(run_cli, small, tiny_mixtral, tmp_path):
    broken = change_tensors(copy_of(small, tmp_path / "broken"), lambda t: t.pop("model.norm.weight"))
    result = run_cli("verify", broken, "--against", tiny_mixtral)
    assert result.code == 3
    assert "has no tensor model.norm.weight" in result.stderr


def test_verify_finds_another_source(run_cli, small, tiny_mixtral, make_mixtral, save_model, tmp_path):
    """One reason, whether shapes differ or numbers alone."""
    same_shape = save_model(make_mixtral(seed=1), tmp_path / "other")
    smaller = save_model(make_mixtral(num_local_experts=3), tmp_path / "smaller")
    for other in (same_shape, smaller):
        result = run_cli("verify", small, "--against", other)
        assert result.code == 5
        said = f"{small}: it was not made from {other}: its manifest has the fingerprint of other files"
        [refused] = [line for line in result.stderr.splitlines() if str(other) in line]
        assert refused == f"error: {said} ({tiny_mixtral})"


def test_verify_finds_a_lost_shard(run_cli, tiny_mixtral_sharded, tmp_path):
    broken = copy_of(tiny_mixtral_sharded, tmp_path / "broken")
    lost = sorted(broken.glob("*.safetensors"))[1]
    lost.unlink()
    result = run_cli("verify", broken)
    assert result.code == 3
    assert lost.name in result.stderr


# -- export

LOAD_PLAINLY = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # as where moetool is not installed
import sys, torch
from transformers import AutoModelForCausalLM
exported, compressed, tokens, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(exported).eval()
with torch.inference_mode():
    torch.save(model(input_ids=torch.load(tokens)).logits, output)
assert not [name for name in sys.modules if name.startswith("moetool")], "this is about transformers alone"
try:
    AutoModelForCausalLM.from_pretrained(compressed)
except Exception as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.slow
def test_export_needs_no_moetool(run_cli, small, tiny_tokens, tmp_path):
    """Transformers alone loads the export; the compressed model it refuses, and names what is missing."""
    output, tokens = tmp_path / "export", tiny_tokens[:192].view(3, 64)
    result = run_cli("export", small, output, "--format", "dense-experts", "--json")
    assert result.code == 0, result.stderr
    torch.save(tokens, tmp_path / "tokens.pt")
    alone = python("-c", LOAD_PLAINLY, output, small, tmp_path / "tokens.pt", tmp_path / "logits.pt")
    assert "refused: " in alone.stderr, alone.stderr
    assert "moetool" in alone.stderr
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits(small, tokens), rtol=0, atol=1e-5)


def test_export_is_in_the_original_layout(run_cli, small, tiny_mixtral, tmp_path):
    assert run_cli("export", small, tmp_path / "out").code == 0
    before, after = (read_header(path / "model.safetensors").tensors for path in (tiny_mixtral, tmp_path / "out"))
    assert {name: (info.dtype, info.shape) for name, info in before.items()} == {
        name: (info.dtype, info.shape) for name, info in after.items()
    }
    assert config_of(tmp_path / "out") == config_of(tiny_mixtral)


def test_export_of_a_lossless_checkpoint_is_the_source(run_cli, decomposed, tiny_mixtral, tmp_path):
    assert run_cli("export", decomposed, tmp_path / "out").code == 0
    assert weights(tmp_path / "out") == weights(tiny_mixtral)


def test_export_says_what_it_leaves_out(run_cli, compress, tiny_mixtral, tmp_path):
    pruned = compress(tiny_mixtral, "--ratio", 0.35, "--prune-base", 0.25, "--pruning", "semi-dynamic").path
    result = run_cli("export", pruned, tmp_path / "out")
    assert result.code == 0
    assert "Dynamic pruning" in result.stderr


# -- list


@pytest.mark.parametrize(
    ("what", "column", "names"),
    [
        ("methods", "method", {"d2moe", "fisher-merge", "decompose", "svd-compress", "prune-base", "vanilla", "dense"}),
        ("architectures", "architecture", {"Mixtral"}),
        ("dense-architectures", "architecture", {"llama", "phi3"}),
        ("targets", "target", {"mixtral", "moetool"}),
        ("representations", "representation", {"dense", "low-rank"}),
        ("presets", "recipe", {"d2moe"}),
    ],
)
def test_list(run_cli, what, column, names):
    result = run_cli("list", what, "--json")
    assert result.code == 0, result.stderr
    listed = {Path(row[column]).stem for row in result.json[what]}
    assert names <= listed
    for_people = run_cli("list", what)
    assert for_people.code == 0
    assert all(name in for_people.stdout for name in names)
    assert "…" not in for_people.stdout, "nothing is cut off"


def test_list_of_nothing_known(run_cli):
    result = run_cli("list", "flavours")
    assert result.code == 2
    assert "architectures" in result.stderr


# -- the command line itself


def test_help_imports_nothing_heavy():
    """`--help` and `--version` are instant because they leave torch and transformers alone."""
    for argument, word in (("--help", "svd-compress"), ("--version", version("moetool"))):
        probe = (
            f"import sys; sys.argv = ['moetool', '{argument}']\n"
            f"try:\n    {COMMAND_LINE}\n"
            f"finally:\n    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
        )
        done = python("-c", probe)
        assert done.returncode == 0
        assert word in done.stdout
        assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_help_of_every_command(run_cli):
    listed = re.findall(r"^  ([a-z-]+) ", run_cli("--help").stdout.partition("Make:")[2], re.M)
    assert {"compress", "eval", "inspect", "verify", "demo", "list", "export"} <= set(listed)
    for command in listed:
        result = run_cli(command, "--help-all")
        assert result.code == 0
        assert f"moetool {command}" in result.stdout
        assert ("--json" in result.stdout) == (command not in {"chat", "serve"})  # which end with no result


def test_no_arguments_and_no_such_command(run_cli):
    assert "Usage" in run_cli().stdout + run_cli().stderr
    result = run_cli("comprss")
    assert result.code == 2
    assert "comprss" in result.stderr


def test_nothing_but_the_output_is_touched(run_cli, tiny_mixtral, calibration, small, tmp_path):
    """Inputs are read-only: a source on a read-only mount works."""
    before = contents(tiny_mixtral), contents(small)
    run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration)
    run_cli("verify", small, "--against", tiny_mixtral)
    run_cli("inspect", small)
    assert (contents(tiny_mixtral), contents(small)) == before
