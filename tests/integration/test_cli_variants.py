"""Everything the D²-MoE paper compares, as options of the command line."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, load, logits, weight_bytes, weights
from safetensors.torch import load_file
from sampling import sampled

from moetool.checkpoint.sizes import format_bytes

MERGES = ("fisher", "fisher-frequency", "mean", "frequency", "ties", "regmean")


def test_every_merge_gives_another_base(run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path) -> None:
    bases = {}
    for merge in MERGES:
        assert run_cli("fisher-merge", tiny_mixtral, tmp_path / merge, "--merge", merge, *calibration).code == 0
        bases[merge] = load_file(tmp_path / merge / "base-00001.safetensors")
    shape = bases["mean"]["base.gate"].shape
    for name in ("base.gate", "base.up", "base.down"):
        distinct = {tuple(base[name].flatten()[:8].tolist()) for base in bases.values()}
        assert len(distinct) == len(MERGES)
    assert all(torch.isfinite(base["base.gate"]).all() for base in bases.values())
    assert all(base["base.gate"].shape == shape for base in bases.values())
    for merge in ("mean", "ties"):  # nothing has to be measured for these
        assert run_cli("fisher-merge", tiny_mixtral, tmp_path / f"{merge}-2", "--merge", merge).code == 0
        again = load_file(tmp_path / f"{merge}-2" / "base-00001.safetensors")
        assert again["base.up"].equal(bases[merge]["base.up"])
    planned = run_cli("fisher-merge", tiny_mixtral, tmp_path / "no", "--merge", "regmean", "--dry-run", "--json")
    assert planned.json["calibration"] == "bundled"


@pytest.mark.parametrize("merge", sampled(["regmean", "fisher-frequency", "ties"], ["ties"]))
def test_every_merge_compresses(run_cli: Any, compress: Any, tiny_mixtral: Path, tmp_path: Path, merge: str) -> None:
    made = compress(tiny_mixtral, "--ratio", 0.3, "--merge", merge)
    assert -0.005 <= weight_bytes(made.path) / weight_bytes(tiny_mixtral) - 0.7 <= 0
    assert run_cli("verify", made.path, "--against", tiny_mixtral).code == 0


@pytest.mark.parametrize("ratio", [0.1, 0.35])
def test_trimmed_experts_are_the_least_routed(compress: Any, tiny_mixtral: Path, ratio: float) -> None:
    made = compress(tiny_mixtral, "--ratio", ratio, "--trim", 2)
    layers = config_of(made.path)["quantization_config"]["layers"]
    assert len(layers) == 3
    for index, layer in layers.items():
        used = torch.tensor(made.told["layers"][index]["tokens"]).argsort(stable=True).tolist()
        for role in ("gate", "up", "down"):
            assert [layer[role][expert] for expert in used[:2]] == ["low-rank:0"] * 2
            assert "low-rank:0" not in [layer[role][expert] for expert in used[2:]]
    if ratio == 0.1:
        by = 1 - made.told["bytes_after"] / made.told["bytes_before"]
        note, _ = made.told["notes"]
        before = format_bytes(weight_bytes(tiny_mixtral))
        assert f"--trim 2 alone makes {before} {by:.1%} smaller, more than the 10.0% that were asked for" in note
    else:
        assert made.told["notes"] == ["`--method auto`, the default, usually loses less in as many bytes."]
        assert -0.005 <= weight_bytes(made.path) / weight_bytes(tiny_mixtral) - 0.65 <= 0


def test_trimming_needs_to_know_the_routing(
    run_cli: Any, tiny_mixtral: Path, calibration: Any, decomposed: Path, tmp_path: Path, compress: Any
) -> None:
    assert run_cli("decompose", tiny_mixtral, tmp_path / "plain", "--base", "mean").code == 0
    trim = ("--ratio", 0.35, "--trim", 2, *calibration)
    refused = run_cli("svd-compress", tmp_path / "plain", tmp_path / "no", *trim)
    assert refused.code == 2
    assert "--trim needs to know" in refused.stderr
    assert run_cli("svd-compress", decomposed, tmp_path / "by-hand", *trim).code == 0
    assert weights(tmp_path / "by-hand") == weights(compress(tiny_mixtral, "--ratio", 0.35, "--trim", 2).path)
    refused = run_cli("svd-compress", decomposed, tmp_path / "no", "--ratio", 0.35, "--trim", 5, *calibration)
    assert refused.code == 2
    assert "--trim 5 is more than the 4 experts" in refused.stderr


def test_adaptive_shares_meet_the_ratio(compress: Any, tiny_mixtral: Path) -> None:
    made = compress(tiny_mixtral, "--ratio", 0.35, "--allocation", "adaptive")
    assert -0.005 <= weight_bytes(made.path) / weight_bytes(tiny_mixtral) - 0.65 <= 0
    layers = config_of(made.path)["quantization_config"]["layers"].values()
    ranks = [{spec for role in ("gate", "up", "down") for spec in layer[role]} for layer in layers]
    assert all(len(specs) <= 3 for specs in ranks), "one share per layer, up to single ranks on top"
    assert len(set.union(*ranks)) > 2


@pytest.fixture(scope="module")
def factored_base(compress: Any, tiny_mixtral_bf16: Path) -> Any:
    return compress(tiny_mixtral_bf16, "--ratio", 0.45, "--prune-base", 0.4, "--pruning", "svd")


def test_a_factored_base_is_stored_as_factors(factored_base: Any, tiny_mixtral_bf16: Path) -> None:
    assert -0.005 <= weight_bytes(factored_base.path) / weight_bytes(tiny_mixtral_bf16) - 0.55 <= 0
    stored = load_file(factored_base.path / "model.safetensors")
    rank = int(0.6 * 32 * 48) // 80
    for layer, entry in config_of(factored_base.path)["quantization_config"]["layers"].items():
        prefix = f"model.layers.{layer}.block_sparse_moe.experts."
        assert entry["base"] == dict.fromkeys(("gate", "up", "down"), f"low-rank:{rank}")
        assert stored[f"{prefix}moetool.base.down.u"].shape == (32, rank)
        assert stored[f"{prefix}0.w1.weight"].shape == (1, 1), "a guard, so that nothing else loads it"


def test_a_factored_base_computes(run_cli: Any, factored_base: Any, tokens: torch.Tensor, tmp_path: Path) -> None:
    expected = logits(factored_base.path, tokens)
    assert run_cli("export", factored_base.path, tmp_path / "dense").code == 0
    torch.testing.assert_close(logits(tmp_path / "dense", tokens), expected, rtol=0.02, atol=0.05)
    load(factored_base.path, torch.bfloat16).save_pretrained(tmp_path / "again")
    saved, stored = (load_file(path / "model.safetensors") for path in (tmp_path / "again", factored_base.path))
    assert saved.keys() == stored.keys()
    assert all(saved[name].equal(stored[name]) for name in stored)
    assert run_cli("verify", factored_base.path).code == 0


def test_a_guard_stops_other_readers(factored_base: Any, tmp_path: Path) -> None:
    shutil.copytree(factored_base.path, tmp_path / "plain")
    config = config_of(factored_base.path)
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="mismatch"):
        load(tmp_path / "plain")


def test_differences_make_up_for_a_factored_base(run_cli: Any, compress: Any, tiny_mixtral: Path) -> None:
    """They are taken against what is stored, so with full rank nothing is lost however small the base is."""
    made = compress(tiny_mixtral, "--rank", 10_000, "--prune-base", 0.5, "--pruning", "svd")
    errors = run_cli("verify", made.path, "--against", tiny_mixtral, "--json").json["relative_error"]
    assert {error for layer in errors.values() for error in layer.values()} == {0.0}
    low = compress(tiny_mixtral, "--rank", 19, "--prune-base", 0.5, "--pruning", "svd")
    errors = run_cli("verify", low.path, "--against", tiny_mixtral, "--json").json["relative_error"]
    assert all(0 < error < 0.6 for layer in errors.values() for error in layer.values())


def test_the_papers_counting_is_not_ours(run_cli: Any, compress: Any, tiny_mixtral: Path) -> None:
    pruned = ("--prune-base", 0.25, "--pruning", "semi-dynamic")
    made = compress(tiny_mixtral, "--ratio", 0.3, *pruned, "--paper-counting")
    assert made.told["achieved_ratio"] < 0.3
    layers = config_of(made.path)["quantization_config"]["layers"].values()
    assert len({spec for layer in layers for role in ("gate", "up", "down") for spec in layer[role]}) == 1
    refused = run_cli("compress", tiny_mixtral, "--method", "d2moe", "unused", "--rank", 3, "--paper-counting")
    assert refused.code == 2
    assert "--paper-counting is about --ratio" in refused.stderr


def test_presets(run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path, compress: Any) -> None:
    preset = ("--preset", "d2moe-40", *calibration)
    assert run_cli("compress", tiny_mixtral, tmp_path / "out", *preset).code == 0
    assert weights(tmp_path / "out") == weights(compress(tiny_mixtral, "--ratio", 0.4).path)
    hybrid = ("--preset", "hybrid-70", "--group-size", 16, "--ratio", 0.4, *calibration)
    plan = run_cli("compress", tiny_mixtral, "unused", *hybrid, "--dry-run")
    assert plan.code == 0, "a preset also says the method"
    assert plan.stdout.startswith("stage")
    assert "hybrid" in plan.stdout
    unknown = run_cli("compress", tiny_mixtral, tmp_path / "no", "--preset", "d2moe-40-thruput")
    assert unknown.code == 2
    assert "Did you mean d2moe-40-throughput?" in unknown.stderr
    older = run_cli("compress", tiny_mixtral, "unused", "--recipe", *hybrid[1:], "--dry-run")
    assert older.code == 2
    assert "No such option: --recipe. Here it is --preset." in older.stderr


@pytest.mark.parametrize(
    ("share", "svd"),
    sampled(product("vu", ("truncation-aware", "vanilla")), [("v", "truncation-aware"), ("u", "vanilla")]),
)
def test_a_shared_factor_is_stored_once(
    run_cli: Any, compress: Any, tiny_mixtral: Path, tokens: torch.Tensor, tmp_path: Path, share: str, svd: str
) -> None:
    made = compress(tiny_mixtral, "--ratio", 0.45, "--share", share, "--svd", svd)
    assert -0.005 <= weight_bytes(made.path) / weight_bytes(tiny_mixtral) - 0.55 <= 0
    stored = load_file(made.path / "model.safetensors")
    own = {"v": "u", "u": "v"}[share]
    shared = [name for name in stored if ".moetool.shared." in name]
    assert shared
    for name in shared:
        prefix, role, factor = name.replace(".shared.", ".{}.").rsplit(".", 2)
        assert factor == share
        for expert in range(4):
            u, v = (stored[name] if f == share else stored[f"{prefix.format(expert)}.{role}.{own}"] for f in "uv")
            assert u.shape[1] == v.shape[0]
    expected = logits(made.path, tokens)
    assert run_cli("export", made.path, tmp_path / "dense").code == 0
    torch.testing.assert_close(logits(tmp_path / "dense", tokens), expected, rtol=0, atol=2e-5 * expected.abs().max())
    load(made.path).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(again[name].equal(stored[name]) for name in stored)
    assert run_cli("verify", made.path, "--against", tiny_mixtral).code == 0


@pytest.mark.parametrize("svd", ["truncation-aware", "vanilla"])
def test_a_shared_u_of_few_wide_experts(
    run_cli: Any, compress: Any, make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory, svd: str
) -> None:
    """Side by side their differences are higher than wide."""
    wide = make_mixtral(hidden_size=16, intermediate_size=48, num_local_experts=2, num_hidden_layers=1)
    source = save_model(wide, tmp_path_factory.mktemp("wide") / svd)
    made = compress(source, "--rank", 4, "--share", "u", "--svd", svd)
    assert run_cli("verify", made.path, "--against", source).code == 0
    stored = load_file(made.path / "model.safetensors")
    assert stored["model.layers.0.block_sparse_moe.experts.moetool.shared.gate.u"].shape == (48, 4)


def test_a_shared_factor_of_one_rank_is_the_best_there_is(run_cli: Any, compress: Any, tiny_mixtral: Path) -> None:
    """Shared V without whitening is the plain SVD of the differences below each other."""
    made = compress(tiny_mixtral, "--rank", 3, "--share", "v", "--svd", "vanilla", "--sensitivity", "none")
    before, after = (load_file(path / "model.safetensors") for path in (tiny_mixtral, made.path))
    prefix = "model.layers.1.block_sparse_moe.experts."
    experts = torch.stack([before[f"{prefix}{expert}.w1.weight"] for expert in range(4)])
    stacked = (experts - after[f"{prefix}0.w1.weight"]).flatten(0, 1)
    v = after[f"{prefix}moetool.shared.gate.v"]
    u = torch.cat([after[f"{prefix}moetool.{expert}.gate.u"] for expert in range(4)])
    best = torch.linalg.svdvals(stacked.double())[3:].square().sum()
    torch.testing.assert_close((stacked - u @ v).double().square().sum(), best, rtol=1e-5, atol=0)


@pytest.mark.parametrize("ratio", sampled([0.15, 0.25], [0.25]))
def test_coded_factors_are_nearer_in_the_same_bytes(
    run_cli: Any, compress: Any, tiny_mixtral_bf16: Path, ratio: float
) -> None:
    plain, coded = (compress(tiny_mixtral_bf16, "--ratio", ratio, *more) for more in ((), ("--factor-bits", 8)))
    before = weight_bytes(tiny_mixtral_bf16)
    assert weight_bytes(coded.path) <= before * (1 - ratio)
    layers = config_of(coded.path)["quantization_config"]["layers"]
    kinds = {spec.split(":")[0] for layer in layers.values() for spec in layer["gate"]}
    assert kinds <= {"quantised-low-rank", "quantised", "low-rank"}
    assert kinds & {"quantised-low-rank", "quantised"}
    lost = [
        sum(sum(role) for layer in made.told["layers"].values() for role in layer["lost_energy"].values())
        for made in (plain, coded)
    ]
    assert lost[1] < 0.7 * lost[0]
    assert run_cli("verify", coded.path, "--against", tiny_mixtral_bf16).code == 0


def test_what_a_rank_loses_is_told_of_coded_factors(compress: Any, tiny_mixtral: Path) -> None:
    plain, coded = (compress(tiny_mixtral, "--rank", 6, *more).told for more in ((), ("--factor-bits", 8)))
    for index, layer in plain["layers"].items():
        assert coded["layers"][index]["lost_energy"] == layer["lost_energy"]


@pytest.mark.parametrize("options", [(), ("--factor-bits", 8), ("--trim", 1), ("--rank", 30, "--factor-bits", 8)])
def test_what_a_rank_takes_is_known_before(
    run_cli: Any, compress: Any, tiny_mixtral: Path, options: tuple[object, ...]
) -> None:
    options = options if "--rank" in options else ("--rank", 6, *options)
    plan = run_cli("compress", tiny_mixtral, "--method", "d2moe", "unused", *options, "--dry-run", "--json").json
    assert plan["output_bytes"] == compress(tiny_mixtral, *options).told["bytes_after"]


def test_widths_without_groups_are_told_before_the_text_is_read(
    run_cli: Any, make_mixtral: Any, save_model: Any, tmp_path: Path
) -> None:
    save_model(make_mixtral(intermediate_size=131), tmp_path / "odd")
    for budget in ("--rank", 3), ("--ratio", 0.2):
        refused = run_cli(
            "compress", tmp_path / "odd", "--method", "d2moe", "unused", *budget, "--factor-bits", 8, "--dry-run"
        )
        assert refused.code == 2
        assert "--factor-bits 8: rows of 131 numbers cannot be cut into equal groups" in refused.stderr


def test_what_does_not_go_with_coded_factors(run_cli: Any, tiny_mixtral: Path) -> None:
    for more in ("--share", "v"), ("--paper-counting",):
        refused = run_cli(
            "compress", tiny_mixtral, "--method", "d2moe", "unused", "--ratio", 0.4, "--factor-bits", 8, *more
        )
        assert refused.code == 2
        assert "exclude each other" in refused.stderr
        assert more[0] in refused.stderr


def test_what_does_not_go_with_sharing(run_cli: Any, tiny_mixtral: Path) -> None:
    for more, says in (("--trim", 1), "exclude each other"), (("--svd", "activation-aware"), "truncation-aware or"):
        refused = run_cli(
            "compress", tiny_mixtral, "--method", "d2moe", "unused", "--ratio", 0.4, "--share", "v", *more
        )
        assert refused.code == 2
        assert says in refused.stderr


def test_a_shared_factor_by_hand(
    run_cli: Any, compress: Any, tiny_mixtral: Path, decomposed: Path, calibration: Any, tmp_path: Path
) -> None:
    options = ("--ratio", 0.45, "--share", "v")
    assert run_cli("svd-compress", decomposed, tmp_path / "by-hand", *options, *calibration).code == 0
    assert weights(tmp_path / "by-hand") == weights(compress(tiny_mixtral, *options).path)


def test_sampled_labels_give_other_gradients_and_the_same_every_time(
    run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path, base: Path
) -> None:
    made = []
    for name in ("first", "second"):
        arguments = ("fisher-merge", tiny_mixtral, tmp_path / name, "--labels", "sampled", *calibration)
        assert run_cli(*arguments).code == 0
        made.append(load_file(tmp_path / name / "base-00001.safetensors"))
    true = load_file(base / "base-00001.safetensors")
    assert all(made[0][name].equal(made[1][name]) for name in made[0])
    assert made[0]["tokens"].equal(true["tokens"])
    assert not made[0]["base.gate"].equal(true["base.gate"])
    # Both estimate how much each output channel matters, on the same few tokens.
    pair = torch.stack([made[0]["fisher.down"].flatten(), true["fisher.down"].flatten()]).log()
    assert torch.corrcoef(pair)[0, 1] > 0.5
