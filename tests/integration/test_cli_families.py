"""Every model family through the whole command line."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import WEIGHTS, CrashDriver, config_of, contents, load, logits, weight_bytes, weights
from derived_families import DERIVED
from safetensors.torch import load_file, save_file
from sampling import MOE_STRUCTURES, sampled

from moetool.architectures.known import KNOWN, REFUSED
from moetool.job.job import Source
from moetool.runtime.modules.experts import SharedBaseExperts

RATIO = 0.25
# What does not depend on a family's own names and layers is tried on a sample.
each_structure = pytest.mark.parametrize(
    "family", sampled(families.FAMILIES, MOE_STRUCTURES), indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=list(families.FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(families.build(family), tmp_path_factory.mktemp(family) / "model")
    families.add_prediction_layer(path)
    return path


@pytest.fixture(scope="module")
def compressed(run_cli: Any, model: Path, calibration: Any) -> Path:
    output = model.parent / "compressed"
    result = run_cli("compress", model, "--method", "d2moe", output, "--ratio", RATIO, *calibration, "--json")
    assert result.code == 0, result.stderr
    return output


def test_every_known_family_is_tested() -> None:
    assert families.FAMILIES.keys() <= KNOWN.keys() <= families.FAMILIES.keys() | DERIVED.keys()


def test_the_ratio_is_met(model: Path, compressed: Path) -> None:
    assert -0.005 <= weight_bytes(compressed) / weight_bytes(model) - (1 - RATIO) <= 0


def test_everything_but_the_experts_is_kept(run_cli: Any, model: Path, compressed: Path) -> None:
    before, after = load_file(model / WEIGHTS), load_file(compressed / WEIGHTS)
    experts = Source.open(model).experts.names
    assert experts
    assert all(after[name].equal(tensor) for name, tensor in before.items() if name not in experts)
    own = {name for name in after if name not in before}
    assert own
    assert all(".experts.moetool." in name for name in own)
    assert run_cli("verify", compressed, "--against", model).code == 0


def test_it_loads_generates_and_saves(compressed: Path, tokens: torch.Tensor, tmp_path: Path) -> None:
    loaded = load(compressed)
    generated = loaded.generate(tokens[:1, :8], max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 8
    loaded.save_pretrained(tmp_path)
    saved, original = load_file(tmp_path / WEIGHTS), load_file(compressed / WEIGHTS)
    passed = {name for name in original if name in saved}
    # Prediction layers are not part of transformers' model, and of tied weights one is enough.
    assert all(".3." in name or name == "lm_head.weight" for name in set(original) - passed)
    assert set(saved) == passed
    assert all(saved[name].equal(original[name]) for name in passed)
    assert torch.equal(logits(tmp_path, tokens), logits(compressed, tokens))


def test_without_moetool_it_does_not_load(compressed: Path, tmp_path: Path) -> None:
    """What a library that has never heard of moetool would do with the same files."""
    shutil.copytree(compressed, tmp_path / "plain")
    config = config_of(compressed)
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="mismatch"):
        load(tmp_path / "plain")


def test_export_computes_the_same(run_cli: Any, model: Path, compressed: Path, tokens: torch.Tensor) -> None:
    output = compressed.parent / "exported"
    assert run_cli("export", compressed, output).code == 0
    assert load_file(output / WEIGHTS).keys() == load_file(model / WEIGHTS).keys()
    assert config_of(output) == config_of(model)
    expected = logits(compressed, tokens)
    torch.testing.assert_close(logits(output, tokens), expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@each_structure
def test_full_rank_loses_nothing(
    run_cli: Any, model: Path, calibration: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    assert run_cli("compress", model, "--method", "d2moe", tmp_path / "full", "--rank", 10_000, *calibration).code == 0
    before, full = logits(model, tokens), load(tmp_path / "full")
    torch.testing.assert_close(full(tokens).logits, before, rtol=0, atol=1e-5 * before.abs().max().item())
    with torch.no_grad():
        for module in full.modules():
            if isinstance(module, SharedBaseExperts):
                for difference in module.moetool.parameters():
                    difference.zero_()
    # A forward that ignored differences would be noticed.
    assert not torch.allclose(full(tokens).logits, before, atol=1e-2 * before.abs().max().item())


@each_structure
def test_stages_by_hand_give_the_bytes_of_compress(
    run_cli: Any, model: Path, compressed: Path, calibration: Any, tmp_path: Path
) -> None:
    steps = [
        ("fisher-merge", model, tmp_path / "base", *calibration),
        ("decompose", model, tmp_path / "split", "--base", tmp_path / "base"),
        ("svd-compress", tmp_path / "split", tmp_path / "by-hand", *calibration, "--ratio", RATIO),
    ]
    for step in steps:
        result = run_cli(*step)
        assert result.code == 0, result.stderr
    assert weights(tmp_path / "by-hand") == weights(compressed)


@each_structure
def test_a_killed_run_resumes_to_the_same_bytes(
    crash: CrashDriver, model: Path, compressed: Path, calibration: Any, tmp_path: Path
) -> None:
    arguments = ("compress", model, "--method", "d2moe", "--ratio", RATIO, *calibration)
    assert crash(tmp_path / "out", arguments, at=25)["code"] == -signal.SIGKILL
    assert not (tmp_path / "out" / "config.json").exists()
    assert crash(tmp_path / "out", (*arguments, "--resume"))["code"] == 0
    assert contents(tmp_path / "out") == contents(compressed)


@each_structure
def test_evaluation_of_both(run_cli: Any, model: Path, compressed: Path, tiny_text: Path) -> None:
    options = ("--data", tiny_text, "--sequence-length", 64, "--windows", 8, "--json")
    before, after = (run_cli("eval", path, *options).json["perplexity"] for path in (model, compressed))
    assert before == pytest.approx(after, rel=0.5)
    assert before != after


@each_structure
def test_dry_run_and_inspection(run_cli: Any, model: Path, compressed: Path, calibration: Any) -> None:
    plan = run_cli(
        "compress", model, "--method", "d2moe", "unused", "--ratio", RATIO, *calibration, "--dry-run", "--json"
    ).json
    assert plan["output_bytes"] == pytest.approx(weight_bytes(compressed), rel=0.01)
    before, after = (run_cli("inspect", path, "--json").json for path in (model, compressed))
    assert before["parameters"]["total"] == after["parameters"]["total"]
    assert before["parameters"]["stored"] > after["parameters"]["stored"]
    assert before["moe_layers"] == len(after["moe"])


def test_granite_without_its_shared_expert(
    run_cli: Any, save_model: Any, calibration: Any, tokens: torch.Tensor, tmp_path: Path, monkeypatch: Any
) -> None:
    name = "granitemoeshared"
    monkeypatch.setitem(families.FAMILIES, name, {**families.FAMILIES[name], "shared_intermediate_size": 0})
    path = save_model(families.build(name), tmp_path / "model")
    assert not [tensor for tensor in load_file(path / WEIGHTS) if "shared_mlp" in tensor]
    result = run_cli("compress", path, "--method", "d2moe", tmp_path / "full", "--rank", 10_000, *calibration)
    assert result.code == 0, result.stderr
    before = logits(path, tokens)
    torch.testing.assert_close(logits(tmp_path / "full", tokens), before, rtol=0, atol=1e-5 * before.abs().max().item())


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_do_not_fit_are_refused(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, model_type: str
) -> None:
    shutil.copytree(tiny_mixtral, tmp_path / "model")
    config = {**config_of(tiny_mixtral), "model_type": model_type}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = run_cli("compress", tmp_path / "model", "--method", "d2moe", tmp_path / "out", "--ratio", 0.3)
    assert result.code == 3
    assert REFUSED[model_type] in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek", {"scoring_func": "sigmoid"}, "not implemented for DeepSeekMoE"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "though num_experts is 6 (decoder_sparse_step is "),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen2_moe", {"mlp_only_layers": "1"}, "'mlp_only_layers' expected a list"),
        ("mixtral", {"quantization_config": {"quant_method": "exl3"}}, "already quantized (quant_method 'exl3')"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "no tensor of the files is"),
        ("qwen3_moe", {"num_experts": 7, "num_local_experts": 7}, "7 experts"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, "'moe_topk', found [2, 1, 2]"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2"),
        (
            "exaone_moe",
            {"mlp_layer_types": ["sparse", "dense"]},
            "equal to the number of `mlp_layer_types` (2)",
        ),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("longcat_flash", {"zero_expert_type": "drop"}, "zero_expert_type = 'drop'"),
    ],
)
def test_configs_that_cannot_be_used(
    run_cli: Any, save_model: Any, tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    path = save_model(families.build(name), tmp_path / "model")
    (path / "config.json").write_text(json.dumps({**config_of(path), **changes}))
    result = run_cli("compress", path, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3)
    assert result.code == 3
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "change", "says"),
    [
        ("qwen2_moe", "model.layers.0.mlp.experts.3.up_proj.weight", lambda t: t[:-1], "config.json promises"),
        ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.weight", lambda t: t[:-1], "promises"),
        ("deepseek_v3", "model.layers.1.mlp.gate.mystery", lambda _: torch.ones(3), "inside an MoE block"),
        ("olmoe", "model.layers.2.mlp.experts.1.gate_proj.weight_scale", lambda _: torch.ones(1), "inside an MoE"),
    ],
)
def test_files_that_contradict_the_config(
    run_cli: Any, save_model: Any, tmp_path: Path, name: str, tensor: str, change: Any, says: str
) -> None:
    path = save_model(families.build(name), tmp_path / "model")
    tensors = load_file(path / WEIGHTS)
    tensors[tensor] = change(tensors.get(tensor)).contiguous()
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    result = run_cli("compress", path, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3)
    assert result.code == 3
    assert says in result.stderr
    assert tensor in result.stderr
    assert not (tmp_path / "out").exists()
