"""`moetool compress`: what it writes, what it says, and that it says and writes the same again."""

import json
from itertools import product

import pytest
import torch
from checkpoints import change_tensors, config_of, contents, copy_of, load, logits, weight_bytes
from sampling import sampled

from moetool.checkpoint.header import read_header

PROMISED = ("ratio", "achieved_ratio", "bytes_before", "bytes_after", "seconds", "peak_memory_bytes", "layers")


@pytest.mark.parametrize(
    ("allocation", "ratio"),
    sampled(
        product(("water-filling", "uniform"), (0.2, 0.35, 0.45)),
        [("water-filling", 0.2), ("water-filling", 0.35), ("water-filling", 0.45), ("uniform", 0.35)],
    ),
)
def test_ratio_is_bytes_on_disk(compress, tiny_mixtral_bf16, ratio, allocation):
    made = compress(tiny_mixtral_bf16, "--ratio", ratio, "--allocation", allocation)
    before, after = weight_bytes(tiny_mixtral_bf16), weight_bytes(made.path)
    target = before * (1 - ratio)
    assert -0.005 * target <= after - target <= 0
    assert made.told["bytes_before"] == before
    assert made.told["bytes_after"] == after
    assert made.told["ratio"] == ratio
    assert made.told["achieved_ratio"] == pytest.approx(1 - after / before, abs=1e-6)


def test_ratio_of_an_fp32_model(compress, tiny_mixtral):
    made = compress(tiny_mixtral, "--ratio", 0.4)
    target = weight_bytes(tiny_mixtral) * 0.6
    assert -0.005 * target <= weight_bytes(made.path) - target <= 0


def test_json_says_what_is_promised(compress, tiny_mixtral_bf16):
    made = compress(tiny_mixtral_bf16, "--ratio", 0.35)
    assert set(PROMISED) <= set(made.told)
    assert made.told["output"] == str(made.path)
    assert made.told["seconds"] > 0
    assert 10_000_000 < made.told["peak_memory_bytes"] < 20_000_000_000
    assert made.told["unreached_experts"] == []
    layers = made.told["layers"]
    assert list(layers) == ["0", "1", "2"]
    for layer in layers.values():
        assert sum(layer["tokens"]) == 16 * 32 * 2  # every token goes to two experts
        for errors in layer["lost_energy"].values():
            assert len(errors) == 4
            assert all(0 <= error <= 1 for error in errors)


def test_log_goes_to_stderr(compress, tiny_mixtral_bf16):
    made = compress(tiny_mixtral_bf16, "--ratio", 0.35)
    for phase in ("Forward", "Backward", "Encode and write"):
        assert phase in made.log
    assert "{" not in made.log


def test_human_result(run_cli, tiny_mixtral_bf16, calibration, tmp_path):
    result = run_cli(
        "compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "out", "--ratio", 0.35, *calibration
    )
    assert result.code == 0
    after = weight_bytes(tmp_path / "out")
    assert f"{after / 1000:.1f} kB" in result.stdout
    assert f"{1 - after / weight_bytes(tiny_mixtral_bf16):.2%} smaller" in result.stdout
    assert "Forward" not in result.stdout


def test_same_seed_same_bytes_other_seed_others(run_cli, compress, tiny_mixtral_bf16, calibration, tmp_path):
    first = contents(compress(tiny_mixtral_bf16, "--ratio", 0.35).path)
    for seed in (0, 1):
        arguments = ("--ratio", 0.35, *calibration, "--seed", seed)
        assert run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / str(seed), *arguments).code == 0
    assert contents(tmp_path / "0") == first
    other = contents(tmp_path / "1")
    assert other["model.safetensors"] != first["model.safetensors"]
    assert json.loads(other["moetool.json"])["seed"] == 1


def test_options_about_where_and_how_change_nothing(run_cli, compress, tiny_mixtral_bf16, calibration, tmp_path):
    options = ("--memory", "64GB", "--disk", "1GB", "--device", "cpu", "--seed", 0, "--method=d2moe")
    result = run_cli(
        "compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "out", "--ratio", 0.35, *calibration, *options
    )
    assert result.code == 0, result.stderr
    assert contents(tmp_path / "out") == contents(compress(tiny_mixtral_bf16, "--ratio", 0.35).path)


def test_everything_but_experts_is_carried_over(run_cli, tiny_mixtral_bf16, calibration, tmp_path):
    """Sidecars byte for byte, the config as it was plus one entry, the other tensors bit for bit, nothing else."""
    source = copy_of(tiny_mixtral_bf16, tmp_path / "source")
    config = {**config_of(source), "of_a_later_library": {"b": [1, 2.5, None], "a": "é"}, "rope_theta": 12345.0}
    (source / "config.json").write_text(json.dumps(config))
    card = b"# \xff not UTF-8 \r\n"
    (source / "README.md").write_bytes(card)
    sidecars = {
        "LICENSE": b"",
        "chat_template.jinja": b"{{ messages }}\n",
        "assets/deep/picture.png": bytes(range(256)),
    }
    for name, data in sidecars.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "pytorch_model.bin").write_bytes(b"a pickle, which nobody reads or copies")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref: refs/heads/main")
    change_tensors(source, lambda tensors: tensors.update({"model.of_a_later_library": torch.arange(7)}))

    output = tmp_path / "out"
    result = run_cli("compress", source, "--method", "d2moe", output, "--ratio", 0.35, *calibration)
    assert result.code == 0, result.stderr

    written = contents(output)
    tokenizer = {name: data for name, data in contents(tiny_mixtral_bf16).items() if not name.startswith("model")}
    expected = {**tokenizer, **sidecars, "moetool/source-README.md": card}
    made = {"config.json", "model.safetensors", "moetool.json", "moetool/statistics.safetensors", "README.md"}
    assert set(written) == set(expected) | made
    assert all(written[name] == data for name, data in expected.items() if name not in made)

    patched = config_of(output)
    entry = patched.pop("quantization_config")
    assert list(patched.items()) == list(config.items())
    assert (entry["quant_method"], entry["format_version"]) == ("moetool", 1)

    before, after = (read_header(path / "model.safetensors").tensors for path in (source, output))
    for name, info in before.items():
        if ".experts." not in name:
            data = [
                (path / "model.safetensors").read_bytes()[where.offset : where.offset + where.nbytes]
                for path, where in ((source, info), (output, after[name]))
            ]
            assert data[0] == data[1], name
    assert not list(output.rglob(".moetool")), "the work directory is gone"
    assert not list(output.rglob("*.tmp"))


def test_the_result_is_a_model(compress, tiny_mixtral, tiny_tokens):
    """It loads, predicts much like the original, and generates."""
    made = compress(tiny_mixtral, "--ratio", 0.2)
    tokens = tiny_tokens[:256].view(4, 64)
    before, after = logits(tiny_mixtral, tokens), logits(made.path, tokens)
    assert 0.001 < (after - before).norm() / before.norm() < 0.5
    model = load(made.path)
    with torch.inference_mode():
        generated = model.generate(tokens[:1, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > 8


def test_smaller_ratio_loses_less(compress, tiny_mixtral_bf16, tiny_tokens):
    tokens = tiny_tokens[:512].view(8, 64)
    before = logits(tiny_mixtral_bf16, tokens)
    errors = [
        (logits(compress(tiny_mixtral_bf16, "--ratio", ratio).path, tokens) - before).norm().item()
        for ratio in (0.2, 0.35, 0.45)
    ]
    assert errors == sorted(errors)


def test_more_windows_than_the_text_has(run_cli, tiny_mixtral_bf16, tiny_text, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text(tiny_text.read_text()[:2000])
    options = ("--calibration", text, "--mix", 0, "--samples", 500, "--sequence-length", 32)
    result = run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *options)
    assert result.code == 0, result.stderr
    assert "not 500: using them all" in result.stderr


def test_an_expert_without_tokens_is_reported(run_cli, make_mixtral, save_model, calibration, tiny_tokens, tmp_path):
    """Scores of opposite experts are a, −a, b, −b: two are positive, so the fifth, always zero, is never chosen."""
    model = make_mixtral(num_local_experts=5)
    with torch.no_grad():
        router = model.model.layers[1].mlp.gate.weight
        router[1], router[3], router[4] = -router[0], -router[2], 0
    source = save_model(model, tmp_path / "source")
    result = run_cli("compress", source, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration, "--json")
    assert result.code == 0, result.stderr
    assert result.json["unreached_experts"] == ["layer 1 expert 4"]
    assert result.json["layers"]["1"]["tokens"][4] == 0
    assert "No calibration token reached 1 expert (layer 1 expert 4): each counts as one average token" in result.stderr
    assert logits(tmp_path / "out", tiny_tokens[:64].view(1, 64)).isfinite().all()
    inspected = run_cli("inspect", tmp_path / "out", "--json").json
    assert inspected["moe"][1]["tokens"][4] == 0


def test_overwrite_replaces_an_earlier_result(run_cli, compress, tiny_mixtral_bf16, calibration, tmp_path):
    arguments = ("compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "out", *calibration)
    assert run_cli(*arguments, "--ratio", 0.2, "--shard-size", "40kB").code == 0
    assert run_cli(*arguments, "--ratio", 0.35, "--overwrite").code == 0
    assert contents(tmp_path / "out") == contents(compress(tiny_mixtral_bf16, "--ratio", 0.35).path)
