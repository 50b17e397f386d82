"""The stages of `compress` as commands: chained, they give its bytes; alone, each gives a model."""

from pathlib import Path

import pytest
import torch
from checkpoints import config_of, contents, logits, weight_bytes, weights
from safetensors.torch import load_file, save_file
from sampling import sampled


@pytest.fixture(scope="module")
def tokens(tiny_tokens):
    return tiny_tokens[1000:1256].view(4, 64)


@pytest.fixture(scope="module")
def mean_decomposed(run_cli, tiny_mixtral, tmp_path_factory):
    """Decomposed against the plain mean: nothing was measured, so nothing is known about its channels."""
    output = tmp_path_factory.mktemp("mean") / "model"
    assert run_cli("decompose", tiny_mixtral, output, "--base", "mean").code == 0
    return output


def chain(run_cli, directory: Path, *commands: tuple[object, ...]) -> Path:
    """Run commands `(name, source, output, *options)` one after the other in `directory`; returns the last output."""
    for command, source, output, *options in commands:
        places = [directory / place if isinstance(place, str) else place for place in (source, output)]
        result = run_cli(command, *places, *options)
        assert result.code == 0, (command, result.stderr)
    return places[-1]


BY_HAND = (
    ("fisher", "--ratio 0.3"),
    ("fisher", "--ratio 0.45 --allocation uniform --sensitivity matrix"),
    ("frequency", "--ratio 0.3 --svd activation-aware --sensitivity none --rank-multiple 2"),
    ("mean", "--rank 5 --svd vanilla"),
    ("fisher", "--ratio 0.45 --factor-bits 8"),
)


@pytest.mark.parametrize(
    ("stored", "merge", "shown"),
    sampled(
        ((stored, *job) for stored in ("tiny_mixtral", "tiny_mixtral_bf16") for job in BY_HAND),
        (
            ("tiny_mixtral_bf16" if place % 2 else "tiny_mixtral", *job)
            for place, job in enumerate(BY_HAND)
            if place != 1
        ),
    ),
)
def test_stages_by_hand_give_the_bytes_of_compress(request, run_cli, calibration, tmp_path, stored, merge, shown):
    source, options = request.getfixturevalue(stored), shown.split()
    by_hand = chain(
        run_cli,
        tmp_path,
        ("fisher-merge", source, "base", *calibration, "--merge", merge),
        ("decompose", source, "decomposed", "--base", tmp_path / "base"),
        ("svd-compress", "decomposed", "by-hand", *calibration, *options),
    )
    at_once = chain(
        run_cli,
        tmp_path,
        ("compress", source, "at-once", "--method", "d2moe", *calibration, "--merge", merge, *options),
    )
    assert weights(by_hand) == weights(at_once)
    configs = [config_of(by_hand), config_of(at_once)]
    entries = [config.pop("quantization_config") for config in configs]
    assert configs[0] == configs[1]
    assert [entry.pop("method") for entry in entries] == ["svd-compress", "d2moe"]
    assert entries[0] == entries[1]
    for earlier in (source, tmp_path / "decomposed"):
        assert run_cli("verify", by_hand, "--against", earlier).code == 0
    statistics = "moetool/statistics.safetensors"
    assert contents(by_hand)[statistics] == contents(at_once)[statistics]


def test_what_errors_cost_together_is_handed_on_to_svd_compress(run_cli, calibration, tiny_mixtral, tmp_path):
    made = chain(
        run_cli,
        tmp_path,
        ("fisher-merge", tiny_mixtral, "base", *calibration),
        ("decompose", tiny_mixtral, "decomposed", "--base", tmp_path / "base"),
        ("prune-base", "decomposed", "pruned", "--ratio", 0.1),
        ("svd-compress", "pruned", "small", *calibration, "--ratio", 0.4),
    )
    metrics = [f"metric-{layer:05d}.safetensors" for layer in range(3)]
    for earlier in ("decomposed", "pruned"):
        found = contents(tmp_path / earlier)
        assert all(found[f"moetool/{name}"] == contents(tmp_path / "base")[name] for name in metrics)
    assert not any("metric" in name for name in contents(made))
    small = (*calibration, "--ratio", 0.4)
    said = ("is damaged (", "does not fit the model", "is damaged (NaN or infinity)")
    for name, words in zip(metrics, said, strict=True):
        file = tmp_path / "pruned" / "moetool" / name
        moment = load_file(file)["mean"]
        if words == said[0]:
            file.write_bytes(file.read_bytes()[:-40])
        else:
            save_file({"mean": moment[1:].clone() if words == said[1] else moment / 0}, file)
        result = run_cli("svd-compress", tmp_path / "pruned", tmp_path / f"not-made-{name}", *small)
        assert result.code == 3
        assert f"{name} {words}" in result.stderr
        file.unlink()
    result = run_cli("svd-compress", tmp_path / "pruned", tmp_path / "by-channel", *small)
    assert result.code == 0, result.stderr
    assert weights(tmp_path / "by-channel") != weights(made)


def test_stages_by_hand_in_shards(run_cli, calibration, tiny_mixtral_sharded, tmp_path):
    """Every stage reads and writes several weight files."""
    shards = ("--shard-size", "60kB")
    by_hand = chain(
        run_cli,
        tmp_path,
        ("fisher-merge", tiny_mixtral_sharded, "base", *calibration),
        ("decompose", tiny_mixtral_sharded, "decomposed", "--base", tmp_path / "base", *shards),
        ("svd-compress", "decomposed", "by-hand", *calibration, "--ratio", 0.3, *shards),
    )
    arguments = (*calibration, "--ratio", 0.3, *shards)
    at_once = chain(run_cli, tmp_path, ("compress", tiny_mixtral_sharded, "at-once", "--method", "d2moe", *arguments))
    assert weights(by_hand) == weights(at_once)
    assert "model.safetensors.index.json" in weights(at_once)
    files = sorted(at_once.glob("*.safetensors"))
    assert len(files) > 2
    target = weight_bytes(tiny_mixtral_sharded) * 0.7
    assert -0.005 * target <= sum(file.stat().st_size for file in files) - target <= 0


def test_shards_hold_what_one_file_holds(run_cli, compress, calibration, tiny_mixtral, tokens, tmp_path):
    """How the weights are cut into files is no part of the model (headers differ, and with them what fits)."""
    one = compress(tiny_mixtral, "--rank", 4).path
    many = chain(
        run_cli,
        tmp_path,
        ("compress", tiny_mixtral, "many", "--method", "d2moe", *calibration, "--rank", 4, "--shard-size", "1B"),
    )
    files = sorted(many.glob("*.safetensors"))
    assert len(files) == 4, "everything outside the layers, and one per layer: a layer is not cut"
    parts = [load_file(file) for file in files]
    together = {name: tensor for part in parts for name, tensor in part.items()}
    whole = load_file(one / "model.safetensors")
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], whole[name]) for name in whole)
    assert torch.equal(logits(many, tokens), logits(one, tokens))


@pytest.mark.parametrize("pruning", sampled(["semi-dynamic", "static"], ["semi-dynamic"]))
def test_pruning_before_factors_is_what_compress_does(run_cli, calibration, tiny_mixtral_bf16, tmp_path, pruning):
    by_hand = chain(
        run_cli,
        tmp_path,
        ("fisher-merge", tiny_mixtral_bf16, "base", *calibration),
        ("decompose", tiny_mixtral_bf16, "decomposed", "--base", tmp_path / "base"),
        ("prune-base", "decomposed", "pruned", "--ratio", 0.25, "--pruning", pruning),
        ("svd-compress", "pruned", "by-hand", *calibration, "--ratio", 0.4),
    )
    options = (*calibration, "--ratio", 0.4, "--prune-base", 0.25, "--pruning", pruning)
    at_once = chain(run_cli, tmp_path, ("compress", tiny_mixtral_bf16, "at-once", "--method", "d2moe", *options))
    assert weights(by_hand) == weights(at_once)
    layers = config_of(at_once)["quantization_config"]["layers"]
    assert layers == config_of(by_hand)["quantization_config"]["layers"]
    static = {"semi-dynamic": 6, "static": 12}[pruning]
    assert {layer["base_channels"] for layer in layers.values()} == {48 - static}
    assert {layer.get("dynamic_channels", 0) for layer in layers.values()} == {12 - static}
    target = weight_bytes(tiny_mixtral_bf16) * 0.6
    assert -0.005 * target <= weight_bytes(at_once) - target <= 0


@pytest.mark.parametrize("stored", ["tiny_mixtral", "tiny_mixtral_bf16"])
def test_decompose_loses_nothing(request, run_cli, tokens, tmp_path, stored):
    source = request.getfixturevalue(stored)
    output = chain(run_cli, tmp_path, ("decompose", source, "out", "--base", "mean"))
    torch.testing.assert_close(logits(output, tokens), logits(source, tokens), rtol=0, atol=1e-5)
    verified = run_cli("verify", output, "--against", source, "--json").json
    assert {error for layer in verified["relative_error"].values() for error in layer.values()} == {0.0}


def test_decompose_with_a_fisher_base_loses_nothing(decomposed, tiny_mixtral, tokens):
    torch.testing.assert_close(logits(decomposed, tokens), logits(tiny_mixtral, tokens), rtol=0, atol=1e-5)


def test_full_rank_loses_nothing(run_cli, decomposed, calibration, tiny_mixtral, tokens, tmp_path):
    """Factors that would cost more than the matrix are not made; it stays dense."""
    output = chain(run_cli, tmp_path, ("svd-compress", decomposed, "out", "--rank", 10_000, *calibration))
    torch.testing.assert_close(logits(output, tokens), logits(tiny_mixtral, tokens), rtol=0, atol=1e-5)
    inspected = run_cli("inspect", output, "--json").json
    assert {spec for layer in inspected["moe"] for role in ("gate", "up", "down") for spec in layer[role]} == {"dense"}


def test_highest_rank_of_factors_loses_little(compress, tiny_mixtral, tokens):
    """Rank 19 is the break-even of 32 × 48; the rest of the spectrum is lost, and only that."""
    before = logits(tiny_mixtral, tokens)
    errors = [
        ((logits(compress(tiny_mixtral, "--rank", rank).path, tokens) - before).norm() / before.norm()).item()
        for rank in (0, 4, 19, 20)
    ]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-5


def test_svd_compress_without_calibration(run_cli, mean_decomposed, tokens, tiny_mixtral, tmp_path):
    result = run_cli("svd-compress", mean_decomposed, tmp_path / "out", "--svd", "vanilla", "--ratio", 0.4, "--json")
    assert result.code == 0, result.stderr
    target = weight_bytes(tiny_mixtral) * 0.6
    assert -0.005 * target <= weight_bytes(tmp_path / "out") - target <= 0
    assert result.json["ratio"] == 0.4
    assert result.json["unreached_experts"] == []
    assert logits(tmp_path / "out", tokens).isfinite().all()


def test_prune_base_after_factors(run_cli, compress, tiny_mixtral, tokens, tmp_path):
    """Uses what the factorising run measured; the factors stay as they are."""
    source = compress(tiny_mixtral, "--ratio", 0.3).path
    result = run_cli("prune-base", source, tmp_path / "out", "--ratio", 0.25, "--json")
    assert result.code == 0, result.stderr
    assert result.json["static_channels"] == 12
    assert result.json["dynamic_channels"] == 0
    assert weight_bytes(tmp_path / "out") < weight_bytes(source)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    factors = [name for name in before if name.endswith((".u", ".v"))]
    assert factors
    assert all(torch.equal(before[name], after[name]) for name in factors)
    assert logits(tmp_path / "out", tokens).isfinite().all()
    inspected = run_cli("inspect", tmp_path / "out", "--json").json
    assert inspected["ratio"] > run_cli("inspect", source, "--json").json["ratio"]


def test_prune_base_measures_for_itself(run_cli, mean_decomposed, calibration, tokens, tmp_path):
    planned = run_cli("prune-base", mean_decomposed, tmp_path / "out", "--dry-run", "--json")
    assert planned.json["calibration"] == "bundled"
    semi_dynamic = ("--pruning", "semi-dynamic", *calibration)
    output = chain(run_cli, tmp_path, ("prune-base", mean_decomposed, "out", "--ratio", 0.5, *semi_dynamic))
    assert logits(output, tokens).isfinite().all()
    inspected = run_cli("inspect", output, "--json").json
    assert {layer["base_channels"] for layer in inspected["moe"]} == {36}
    assert {layer["dynamic_channels"] for layer in inspected["moe"]} == {12}


def test_mean_base_needs_no_calibration(run_cli, tiny_mixtral, mean_decomposed, tmp_path):
    output = chain(
        run_cli,
        tmp_path,
        ("fisher-merge", tiny_mixtral, "base", "--merge", "mean"),
        ("decompose", tiny_mixtral, "out", "--base", tmp_path / "base"),
    )
    assert weights(output) == weights(mean_decomposed)


def test_fisher_merge_writes_no_model(base):
    files = [f"{kind}-{layer:05d}.safetensors" for kind in ("base", "metric") for layer in range(3)]
    assert sorted(contents(base)) == sorted(["README.md", *files, "moetool.json"])


def test_stages_are_repeatable(run_cli, base, decomposed, calibration, tiny_mixtral, tmp_path):
    chain(run_cli, tmp_path, ("fisher-merge", tiny_mixtral, "base", *calibration))
    assert contents(tmp_path / "base") == contents(base)
    chain(run_cli, tmp_path, ("decompose", tiny_mixtral, "again", "--base", base))
    assert contents(tmp_path / "again") == contents(decomposed)


@pytest.mark.parametrize(
    ("command", "source", "options", "code", "words"),
    [
        ("svd-compress", "tiny_mixtral", ("--ratio", 0.3), 3, ["run decompose"]),
        ("prune-base", "tiny_mixtral", (), 3, ["run decompose"]),
        ("export", "tiny_mixtral", (), 2, ["original layout"]),
        (
            "decompose",
            "decomposed",
            (),
            2,
            ["already decomposed: svd-compress, quantize-delta"],
        ),
        (
            "compress",
            "decomposed",
            ("--method", "d2moe", "--ratio", 0.3),
            2,
            ["in moetool's format already", "--format dense-experts"],
        ),
        ("svd-compress", "base", ("--ratio", 0.3), 3, ["base that fisher-merge made"]),
        ("fisher-merge", "small", (), 2, ["is compressed already: fisher-merge and decompose start from"]),
    ],
)
def test_stages_in_the_wrong_order(request, run_cli, calibration, tmp_path, command, source, options, code, words):
    if command in ("compress", "svd-compress", "fisher-merge"):
        options = (*options, *calibration)
    result = run_cli(command, request.getfixturevalue(source), tmp_path / "out", *options)
    assert result.code == code
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_result_is_not_made_larger_again(run_cli, decomposed, calibration, tmp_path):
    chain(run_cli, tmp_path, ("svd-compress", decomposed, "once", "--rank", 4, *calibration))
    result = run_cli("svd-compress", tmp_path / "once", tmp_path / "twice", "--ratio", 0.2, *calibration)
    assert result.code == 2
    least = float(result.stderr.rpartition("--ratio must be above ")[2].split()[0])
    assert 0.2 < least < 0.7
    assert run_cli("svd-compress", tmp_path / "once", tmp_path / "twice", "--ratio", least, *calibration).code == 0
    assert weight_bytes(tmp_path / "twice") <= weight_bytes(tmp_path / "once")


def test_pruning_twice(run_cli, decomposed, tmp_path):
    chain(run_cli, tmp_path, ("prune-base", decomposed, "once", "--ratio", 0.25))
    result = run_cli("prune-base", tmp_path / "once", tmp_path / "twice", "--ratio", 0.25)
    assert result.code == 3
    assert "already pruned. For another --ratio start from what came before." in result.stderr


def test_a_share_of_channels_is_not_called_one_of_bytes(run_cli, decomposed, tmp_path):
    for ratio, words in ((1.5, "--ratio 1.5: it should be less than 1"), (40, "for 40 % write 0.4 or 40%")):
        result = run_cli("prune-base", decomposed, tmp_path / "out", "--ratio", ratio)
        assert result.code == 2
        assert words in result.stderr
        assert "bytes" not in result.stderr


def test_a_base_of_another_model(run_cli, base, tiny_mixtral_bf16, tmp_path):
    result = run_cli("decompose", tiny_mixtral_bf16, tmp_path / "out", "--base", base)
    assert result.code == 3
    assert "another model" in result.stderr


@pytest.mark.parametrize("damage", ["missing", "no base", "incomplete", "truncated"])
def test_a_base_that_is_none(run_cli, base, tiny_mixtral, tmp_path, damage):
    directory = tmp_path / "base"
    if damage != "missing":
        directory.mkdir()
    if damage in ("incomplete", "truncated"):
        for name, data in contents(base).items():
            (directory / name).write_bytes(data)
        last = directory / "base-00002.safetensors"
        if damage == "incomplete":
            last.unlink()
        else:
            last.write_bytes(last.read_bytes()[:-1])
    result = run_cli("decompose", tiny_mixtral, tmp_path / "out", "--base", directory)
    assert result.code == 3, result.stderr
    assert str(directory) in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_fisher_statistics_says_so(run_cli, mean_decomposed, calibration, tmp_path):
    result = run_cli("svd-compress", mean_decomposed, tmp_path / "out", "--ratio", 0.3, *calibration)
    assert result.code == 0
    assert "no Fisher statistics" in result.stderr
