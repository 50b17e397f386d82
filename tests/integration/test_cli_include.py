"""Attention and embeddings in codes beside compressed experts: `compress … --include`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    change_config,
    change_tensors,
    config_of,
    copy_of,
    load_whole,
    logits,
    relative_error,
    tensors_of,
    weight_bytes,
    weights,
)
from sampling import sampled
from torch import Tensor

import moetool
from moetool.checkpoint.sizes import format_bytes
from moetool.runtime.modules.quantized import QuantizedEmbedding, QuantizedLinear
from moetool.runtime.modules.quantized_in_model import quantized_modules

BOTH = ("--include", "attention,embeddings")
QUANTIZE = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", "--group-size", 16)
PROJECTIONS = [f"model.layers.{layer}.self_attn.{letter}_proj" for layer in range(3) for letter in "qkvo"]
EMBEDDINGS = ["model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def made(compress: Any, tiny_mixtral_bf16: Path) -> Any:
    return compress(tiny_mixtral_bf16, *QUANTIZE, *BOTH)


def test_every_block_is_as_near_as_8_bits_are(made: Any, tiny_mixtral_bf16: Path) -> None:
    """No block has a larger error than evenly spaced levels up to its largest number would have at most."""
    before, after = tensors_of(tiny_mixtral_bf16), tensors_of(made.path)
    assert set(config_of(made.path)["quantization_config"]["beside"]) == {*PROJECTIONS, *EMBEDDINGS}
    for name in (*PROJECTIONS, *EMBEDDINGS):
        matrix, scales = before[f"{name}.weight"].float(), after[f"{name}.moetool.scales"]
        assert after[f"{name}.weight"].shape == (1, 1)
        codes = after[f"{name}.moetool.codes"].view(matrix.shape).float() - 127
        blocks = codes.view(*scales.shape, -1) * scales.float().unsqueeze(2)
        exact = matrix.view_as(blocks)
        worst = exact.abs().amax(2) / 254 * 1.01  # and what rounding of a scale may add
        assert ((blocks - exact).square().mean(2).sqrt() <= worst).all()
        assert relative_error(blocks, exact) < 0.006
    untouched = [name for name in before if "norm" in name or ".gate." in name]
    assert untouched
    assert all(after[name].equal(before[name]) for name in untouched)


@pytest.mark.parametrize("asked", ["attention", "embeddings"])
def test_each_by_itself(compress: Any, tiny_mixtral_bf16: Path, asked: str) -> None:
    told = compress(tiny_mixtral_bf16, *QUANTIZE, "--include", asked)
    listed = config_of(told.path)["quantization_config"]["beside"]
    assert list(listed) == (PROJECTIONS if asked == "attention" else EMBEDDINGS)


def test_transformers_loads_and_computes_nearly_the_same(made: Any, tiny_mixtral_bf16: Path, tokens: Tensor) -> None:
    model = load_whole(made.path)
    kinds = [type(module) for _, module in quantized_modules(model)]
    assert (kinds.count(QuantizedLinear), kinds.count(QuantizedEmbedding)) == (13, 1)
    found, expected = logits(made.path, tokens), logits(tiny_mixtral_bf16, tokens)
    assert relative_error(found, expected) < 0.1
    assert moetool.synthesize(model)(tokens).logits.allclose(found, atol=1e-3)
    assert not [*quantized_modules(model)]


def test_what_is_tied_stays_tied(compress: Any, tied: Path, tokens: Tensor, tmp_path: Path) -> None:
    made = compress(tied, *QUANTIZE, *BOTH)
    assert "lm_head.weight" not in tensors_of(made.path)
    model = load_whole(made.path)
    assert model.lm_head.stored is model.model.embed_tokens.stored
    assert relative_error(logits(made.path, tokens), logits(tied, tokens)) < 0.1
    model.bfloat16().save_pretrained(tmp_path)
    assert {name: tensor.shape for name, tensor in tensors_of(tmp_path).items()} == {
        name: tensor.shape for name, tensor in tensors_of(made.path).items()
    }
    assert logits(tmp_path, tokens).equal(logits(made.path, tokens))
    whole = moetool.synthesize(model)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight


@pytest.mark.parametrize("held", sampled(("both", "both, different", "head", "untied"), ("both, different", "head")))
def test_whichever_of_two_matrices_is_in_the_file(
    compress: Any, tied: Path, tokens: Tensor, held: str, tmp_path: Path
) -> None:
    """The result is what transformers makes of the source: two that differ are not tied, whatever its config says."""
    source, embedding = copy_of(tied, tmp_path / "source"), tensors_of(tied)["model.embed_tokens.weight"]
    factor = 1.5 if held == "both, different" else 1
    change_tensors(source, lambda tensors: tensors.update({"lm_head.weight": factor * embedding}))
    if held == "head":
        change_tensors(source, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    if held == "untied":
        change_config(source, tie_word_embeddings=False)
    made = compress(source, *QUANTIZE, *BOTH)
    found = logits(made.path, tokens)
    assert relative_error(found, logits(source, tokens)) < 0.1
    load_whole(made.path).save_pretrained(tmp_path / "again")
    assert logits(tmp_path / "again", tokens).equal(found)


@pytest.mark.parametrize(
    "method",
    [
        ("--method", "hybrid", "--group-size", 16, "--ratio", 0.5),
        pytest.param(("--method", "d2moe", "--ratio", 0.35), marks=pytest.mark.exhaustive),
    ],
)
def test_what_it_saves_is_left_for_experts(
    method: tuple[object, ...], compress: Any, run_cli: Any, tiny_mixtral_bf16: Path
) -> None:
    """The whole checkpoint is as large as without, and as was promised; experts have more of it."""
    plain, more = (compress(tiny_mixtral_bf16, *method, *include) for include in ((), BOTH))
    dense = sum(
        tensor.nbytes for name, tensor in tensors_of(tiny_mixtral_bf16).items() if name[:-7] in PROJECTIONS + EMBEDDINGS
    )
    sizes = [weight_bytes(made.path) for made in (plain, more)]
    target = round(weight_bytes(tiny_mixtral_bf16) * (1 - float(str(method[-1]))))
    assert all(0.98 * target < size <= target for size in sizes)
    assert sizes == [made.told["bytes_after"] for made in (plain, more)]
    experts = [
        sum(tensor.nbytes for name, tensor in tensors_of(made.path).items() if ".experts." in name)
        for made in (plain, more)
    ]
    found = run_cli("inspect", more.path, "--json").json
    assert found["beside"]["modules"] == 14
    assert found["beside"]["bytes"] < 0.65 * dense
    assert experts[1] > experts[0]
    counts = run_cli("inspect", plain.path, "--json").json["parameters"]
    assert found["parameters"]["total"] == counts["total"]
    stored = [tensor.numel() for tensor in tensors_of(more.path).values() if tensor.shape != (1, 1)]
    assert found["parameters"]["stored"] == sum(stored)
    assert run_cli("verify", more.path, "--against", tiny_mixtral_bf16).code == 0


@pytest.mark.parametrize(("size", "few"), sampled([("130kB", False), ("70kB", True)], [("130kB", False)]))
def test_a_result_whose_experts_have_few_bits_names_it(
    compress: Any, tiny_mixtral_bf16: Path, size: str, few: bool
) -> None:
    method = ("--method", "hybrid", "--group-size", 16, "--size", size)
    plain, tensors = compress(tiny_mixtral_bf16, *method), tensors_of(tiny_mixtral_bf16)
    dense = sum(tensor.nbytes for name, tensor in tensors.items() if name[:-7] in PROJECTIONS + EMBEDDINGS)
    experts = [tensor for name, tensor in tensors.items() if ".experts." in name]
    left = plain.told["bytes_after"] - weight_bytes(tiny_mixtral_bf16) + sum(tensor.nbytes for tensor in experts)
    bits = 8 * left / sum(tensor.numel() for tensor in experts)
    saved = dense - dense * (1 + 2 / 32) / 2  # codes and a scale for every row of 32
    sentence = (
        f"Attention and embeddings take {format_bytes(dense)} of {format_bytes(plain.told['bytes_after'])}, and the "
        f"experts have {bits:.1f} bits per number: --include attention,embeddings would store attention and "
        f"embeddings in 8 bits, and leave the experts {format_bytes(round(saved))} more."
    )
    assert (bits < 3, sentence in plain.told["notes"]) == (few, few)
    if few:
        more = compress(tiny_mixtral_bf16, *method, *BOTH)
        assert not [note for note in more.told["notes"] if "--include" in note]


def test_a_budget_counts_what_they_cost(
    run_cli: Any, calibration: Any, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    """What is possible within it is less by what they save, and by nothing else."""
    auto = ("compress", tiny_mixtral_bf16, tmp_path / "out", "--method", "auto", "--size", "70kB", *calibration)
    without = ("--include", "none")
    plain, more = (run_cli(*auto, *include, "--dry-run", "--json").json for include in (without, BOTH))
    assert plain["output_bytes"] == more["output_bytes"] == 70_000
    tensors = tensors_of(tiny_mixtral_bf16)
    dense = sum(tensors[f"{name}.weight"].numel() for name in (*PROJECTIONS, *EMBEDDINGS))
    saved = 2 * dense - dense * (1 + 2 / 32)  # codes and a scale for every row of 32
    headers = 2000  # of files
    less = plain["smallest_possible_bytes"] - more["smallest_possible_bytes"]
    assert saved - headers - 14 * 200 < less < saved


def test_it_is_verified_exported_and_compressed_on(
    made: Any, compress: Any, run_cli: Any, tiny_mixtral_bf16: Path, tokens: Tensor, tmp_path: Path, calibration: Any
) -> None:
    told = run_cli("verify", made.path, "--against", tiny_mixtral_bf16, "--json")
    assert told.code == 0, told.stderr
    left = len([name for name in tensors_of(tiny_mixtral_bf16) if "norm" in name]) + 3
    assert (told.json["same_tensors"], told.json["rounded_tensors"]) == (left, 14)
    assert "outside the experts 14 matrices are in few bits, everything else is bit for bit the same" in " ".join(
        run_cli("verify", made.path, "--against", tiny_mixtral_bf16).stdout.split()
    )
    assert "14 projections and embeddings in 8 bits" in run_cli("inspect", made.path).stdout
    dense = tmp_path / "dense"
    assert run_cli("export", made.path, dense).code == 0
    assert tensors_of(dense).keys() == tensors_of(tiny_mixtral_bf16).keys()
    assert "quantization_config" not in config_of(dense)
    assert relative_error(logits(dense, tokens), logits(made.path, tokens)) < 0.1
    told = run_cli("verify", dense, "--against", made.path, "--json")
    assert told.code == 0, told.stderr
    assert told.json["same_tensors"] == len([name for name in tensors_of(dense) if ".experts." not in name])
    told = run_cli("verify", dense, "--against", tiny_mixtral_bf16, "--json")
    assert told.code == 0, told.stderr
    assert (told.json["same_tensors"], told.json["rounded_tensors"]) == (left, 14)
    packed = tmp_path / "packed"
    options = ("--format", "compressed-tensors", "--bits", 8, "--group-size", 16)
    assert run_cli("export", made.path, packed, *options).code == 0
    assert tensors_of(packed)["lm_head.weight"].equal(tensors_of(dense)["lm_head.weight"])
    assert config_of(packed)["quantization_config"]["quant_method"] == "compressed-tensors"
    told = run_cli("verify", packed, "--against", made.path, "--json")
    assert told.code == 0, told.stderr
    assert told.json["same_tensors"] == left + 14
    first = compress(tiny_mixtral_bf16, "--method", "d2moe", "--ratio", 0.35, *BOTH).path
    further = [
        ("prune-base", "--ratio", 0.1),
        ("quantize-delta", "--bits", 4, "--group-size", 4, *calibration),
    ]
    for number, (stage, *options_of) in enumerate(further):
        output = tmp_path / str(number)
        result = run_cli(stage, first, output, *options_of)
        assert result.code == 0, result.stderr
        kept = {name: own for name, own in tensors_of(first).items() if ".self_attn." in name or "embed" in name}
        after = tensors_of(output)
        assert all(after[name].equal(own) for name, own in kept.items())
        assert config_of(output)["quantization_config"]["beside"] == config_of(first)["quantization_config"]["beside"]
        assert config_of(output)["quantization_config"]["format_version"] == 2
        assert run_cli("verify", output, "--against", first).code == 0


def test_experts_are_tuned_and_factors_refused(
    compress: Any, run_cli: Any, tiny_mixtral_bf16: Path, tiny_text: Path, tmp_path: Path
) -> None:
    source = compress(tiny_mixtral_bf16, "--method", "d2moe", "--ratio", 0.35, *BOTH).path
    short = ("--data", tiny_text, "--sequence-length", 32, "--batch-size", 2, "--steps", 2, "--learning-rate", 1e-2)
    result = run_cli("tune", source, tmp_path / "tuned", *short)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert all(".experts." in name or ".gate." in name for name in changed)
    refused = run_cli("tune", source, tmp_path / "lora", *short, "--lora-rank", 2)
    assert refused.code == 2
    assert "14 linear layers and embeddings of this model are stored as codes" in refused.stderr


def test_killed_and_resumed_it_is_the_same(crash: Any, tiny_mixtral_bf16: Path, tmp_path: Path) -> None:
    arguments = ("compress", tiny_mixtral_bf16, "--method", "d2moe", *QUANTIZE, *BOTH, "--shard-size", "25kB")
    crash.whole(tmp_path / "undisturbed", arguments)
    assert len(weights(tmp_path / "undisturbed")) > 3
    crash.goes_on(tmp_path / "killed", arguments, 30, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("include", "told"),
    [
        ("experts", "there is attention and embeddings"),
        ("attention,,", "with commas between them"),
        ("attention:4", "attention can have 5, 6, 8 bits, not '4'"),
        ("attention:", "attention can have 5, 6, 8 bits, not ''"),
        ("attention:6,attention", "attention is given twice, in 6 and in 8 bits"),
        ("none:6", "there is attention and embeddings"),
    ],
)
def test_what_cannot_be_included(
    include: str, told: str, run_cli: Any, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    result = run_cli("compress", tiny_mixtral_bf16, tmp_path / "out", *QUANTIZE, "--include", include)
    assert (result.code, (tmp_path / "out").exists()) == (2, False)
    assert told in result.stderr


@pytest.mark.parametrize("include", [BOTH, ()], ids=["coded", "copied"])
def test_damage_is_named(run_cli: Any, tiny_mixtral_bf16: Path, tmp_path: Path, include: tuple[str, ...]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    damaged = copy_of(tiny_mixtral_bf16, tmp_path / "damaged")
    change_tensors(damaged, lambda tensors: tensors[name][3].fill_(torch.nan))
    result = run_cli("compress", damaged, tmp_path / "out", *QUANTIZE, *include)
    assert result.code == 3
    assert f"Tensor {name} of {damaged} has NaN or infinite values" in result.stderr


def test_a_list_that_does_not_fit_is_found_without_a_manifest(made: Any, run_cli: Any, tmp_path: Path) -> None:
    """As `save_pretrained` leaves it: no digests, names and shapes alone."""
    saved = copy_of(made.path, tmp_path / "saved")
    (saved / "moetool.json").unlink()
    assert run_cli("verify", saved).code == 0
    entry = config_of(saved)["quantization_config"]
    del entry["beside"]["model.embed_tokens"]
    result = run_cli("verify", change_config(saved, quantization_config=entry))
    assert result.code == 3
    assert "model.embed_tokens.weight" in result.stderr
    assert "[1, 1], config.json promises [288, 32]" in result.stderr


def test_a_model_of_custom_modules_has_none_to_include(dense: Any, upcycle: Any, run_cli: Any, tmp_path: Path) -> None:
    custom = upcycle(dense("llama"), "--experts", 4, "--target", "moetool").path
    result = run_cli("compress", custom, tmp_path / "out", *QUANTIZE, *BOTH)
    assert result.code == 2
    assert "--include attention: " in result.stderr


@pytest.mark.parametrize(("size", "few"), sampled([("130kB", False), ("70kB", True)], [("130kB", False)]))
def test_auto_includes_them_where_experts_have_few_bits(
    run_cli: Any, calibration: Any, tiny_mixtral_bf16: Path, size: str, few: bool, tmp_path: Path
) -> None:
    """By itself as if it had been asked to, and as a plan file says that was saved then."""
    options = ("--size", size, *calibration, "--group-size", 16)
    saved = tmp_path / "plan.yaml"
    for name, more in (
        ("default", ("--save-plan", saved)),
        ("asked", BOTH if few else ("--include", "none")),
    ):
        result = run_cli("compress", tiny_mixtral_bf16, tmp_path / name, *options, *more)
        assert result.code == 0, result.stderr
    beside = config_of(tmp_path / "default")["quantization_config"].get("beside", {})
    assert set(beside) == ({*PROJECTIONS, *EMBEDDINGS} if few else set())
    default, asked = (tensors_of(tmp_path / name) for name in ("default", "asked"))
    assert default.keys() == asked.keys()
    assert all(tensor.equal(asked[name]) for name, tensor in default.items())
    followed = ("compress", tiny_mixtral_bf16, tmp_path / "followed", "--plan", saved, *calibration)
    assert run_cli(*followed, "--group-size", 16).code == 0
    assert set(config_of(tmp_path / "followed")["quantization_config"].get("beside", {})) == set(beside)


def test_a_plan_that_includes_what_it_cannot(
    run_cli: Any, calibration: Any, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.yaml"
    options = ("compress", tiny_mixtral_bf16, tmp_path / "out", *calibration)
    assert run_cli(*options, "--size", "70kB", "--group-size", 16, "--save-plan", saved).code == 0
    saved.write_text(saved.read_text().replace("include: [attention, embeddings]", "include: [router]"))
    result = run_cli(*options, "--overwrite", "--plan", saved)
    assert result.code == 3
    assert "`include`: there is attention and embeddings, or both with a comma, not 'router'" in result.stderr
