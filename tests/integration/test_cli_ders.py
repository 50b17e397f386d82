"""DeRS compression and hybrids: differences in few bits or few numbers, through the command line."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import (
    WEIGHTS,
    CrashDriver,
    change_config,
    config_of,
    copy_of,
    load,
    logits,
    weight_bytes,
    weights,
)
from safetensors.torch import load_file, save_file
from sampling import sampled
from transformers import LlamaConfig, LlamaForCausalLM

from moetool import synthesize

GROUP = ("--group-size", 16)

METHODS: dict[str, tuple[object, ...]] = {
    "quantize": ("--method", "ders-quantize", "--bits", 4, *GROUP),
    "quantize with a base in few bits": ("--method", "ders-quantize", "--bits", 2, "--base-bits", 4, *GROUP),
    "a base in NF4": ("--method", "ders-quantize", "--bits", 4, "--base-bits", "nf4", *GROUP),
    "a base in int8": ("--method", "ders-sparsify", "--drop", 0.5, "--base-bits", "int8"),
    "quantize, rounded on text": ("--method", "ders-quantize", "--bits", 3, "--base-bits", 8, *GROUP, "TEXT"),
    "sparsify": ("--method", "ders-sparsify", "--drop", 0.8),
    "sparsify by magnitude": ("--method", "ders-sparsify", "--drop", 0.8, "--select", "magnitude"),
    "low-rank and sparse": ("--method", "ders-sparsify", "--drop", 0.9, "--select", "magnitude", "--rank", 3),
    "low-rank and random": ("--method", "ders-sparsify", "--drop", 0.9, "--rank", 3),
    "hybrid": ("--method", "hybrid", "--ratio", 0.5, *GROUP, "TEXT"),
}


@pytest.fixture(scope="module")
def made(run_cli: Any, calibration: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`made(source, *options)`: `compress` without text unless the options end in "TEXT"; (path, what it told)."""
    done: dict[tuple[object, ...], tuple[Path, Any]] = {}

    def make(source: Path, *options: object) -> tuple[Path, Any]:
        if (source, *options) not in done:
            output = tmp_path_factory.mktemp("ders") / "model"
            text = calibration if options[-1] == "TEXT" else ()
            chosen = [option for option in options if option != "TEXT"]
            result = run_cli("compress", source, "--method", "d2moe", output, *chosen, *text, "--json")
            assert result.code == 0, result.stderr
            done[source, *options] = output, result.json
        return done[source, *options]

    return make


@pytest.fixture(scope="module")
def dense(tiny_mixtral: Path, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose FFNs are the means of `tiny_mixtral`'s experts."""
    own = config_of(tiny_mixtral)
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = LlamaConfig(**{key: own[key] for key in keys}, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    path = save_model(LlamaForCausalLM(config), tmp_path_factory.mktemp("dense") / "llama")
    tensors, experts = load_file(path / WEIGHTS), load_file(tiny_mixtral / WEIGHTS)
    for layer in range(3):
        for role, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts."
            mean = torch.stack([experts[f"{prefix}{e}.{name}.weight"] for e in range(4)]).mean(0)
            tensors[f"model.layers.{layer}.mlp.{role}_proj.weight"] = mean
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("method", "stored"),
    sampled(
        product(METHODS, ("tiny_mixtral", "tiny_mixtral_bf16")),
        [
            *product(tuple(METHODS)[::2], ["tiny_mixtral"]),
            *product(("hybrid", "low-rank and sparse"), ["tiny_mixtral_bf16"]),
        ],
    ),
)
def test_results_load_compute_and_save(
    request: Any, run_cli: Any, made: Any, tokens: torch.Tensor, tmp_path: Path, stored: str, method: str
) -> None:
    source = request.getfixturevalue(stored)
    path, told = made(source, *METHODS[method])
    assert weight_bytes(path) < weight_bytes(source)
    assert told["bytes_after"] == weight_bytes(path)
    expected = logits(path, tokens)
    assert torch.isfinite(expected).all()
    assert run_cli("export", path, tmp_path / "dense").code == 0
    assert load_file(tmp_path / "dense" / WEIGHTS).keys() == load_file(source / WEIGHTS).keys()
    exported = logits(tmp_path / "dense", tokens)
    # Rounded to bf16, experts differ a little, and now and then a token goes to another one.
    assert (exported - expected).norm() < (2e-5 if stored == "tiny_mixtral" else 0.2) * expected.norm()
    native = torch.float32 if stored == "tiny_mixtral" else torch.bfloat16
    load(path, native).save_pretrained(tmp_path / "again")
    saved, original = load_file(tmp_path / "again" / WEIGHTS), load_file(path / WEIGHTS)
    assert saved.keys() == original.keys()
    assert all(saved[name].equal(original[name]) and saved[name].dtype == original[name].dtype for name in original)
    assert run_cli("verify", path, "--against", source).code == 0
    assert load(path).generate(tokens[:1, :8], max_new_tokens=3, do_sample=False).shape == (1, 11)


@pytest.mark.parametrize(
    ("name", "method"),
    sampled(
        product(("qwen2_moe", "deepseek_v3", "granitemoe", "phimoe"), ("quantize with a base in few bits", "sparsify")),
        [("deepseek_v3", "sparsify"), ("granitemoe", "quantize with a base in few bits"), ("phimoe", "sparsify")],
    ),
)
def test_other_families(
    run_cli: Any, made: Any, save_model: Any, tokens: torch.Tensor, tmp_path: Path, name: str, method: str
) -> None:
    options = METHODS[method]
    source = save_model(families.build(name), tmp_path / "model")
    if "--group-size" in options:
        options = (*options[:-1], 8)
    path, _ = made(source, *options)
    expected = logits(path, tokens)
    assert run_cli("export", path, tmp_path / "dense").code == 0
    torch.testing.assert_close(
        logits(tmp_path / "dense", tokens), expected, rtol=0, atol=2e-5 * expected.abs().max().item()
    )
    with pytest.raises(RuntimeError, match="mismatch"):
        load(change_config(copy_of(path, tmp_path / "plain"), quantization_config=None))


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (("--base", "mean"), ("quantize-delta", "--bits", 4, *GROUP), METHODS["quantize"]),
        (
            ("--base-bits", 4, *GROUP),
            ("quantize-delta", "--bits", 2, *GROUP),
            METHODS["quantize with a base in few bits"],
        ),
        (("--base", "mean"), ("sparsify-delta", "--drop", 0.8), METHODS["sparsify"]),
        (
            ("--base", "mean"),
            ("sparsify-delta", "--drop", 0.8, "--select", "magnitude"),
            METHODS["sparsify by magnitude"],
        ),
    ],
)
def test_two_stages_by_hand_give_the_bytes_of_one(
    run_cli: Any, made: Any, tiny_mixtral_bf16: Path, tmp_path: Path, first: Any, second: Any, options: Any
) -> None:
    assert run_cli("decompose", tiny_mixtral_bf16, tmp_path / "split", *first).code == 0
    stage, *more = second
    assert run_cli(stage, tmp_path / "split", tmp_path / "by-hand", *more).code == 0
    assert weights(tmp_path / "by-hand") == weights(made(tiny_mixtral_bf16, *options)[0])


def test_a_base_in_few_bits_loses_nothing_by_itself(
    run_cli: Any, tiny_mixtral: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    assert run_cli("decompose", tiny_mixtral, tmp_path / "split", "--base-bits", 2, *GROUP).code == 0
    torch.testing.assert_close(logits(tmp_path / "split", tokens), logits(tiny_mixtral, tokens), rtol=0, atol=1e-5)


def test_the_true_base(
    run_cli: Any, made: Any, tiny_mixtral: Path, dense: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """A dense checkpoint as base: here its FFNs are the experts' means, so both ways lead to the same bytes."""
    assert run_cli("decompose", tiny_mixtral, tmp_path / "split", "--base", dense).code == 0
    torch.testing.assert_close(logits(tmp_path / "split", tokens), logits(tiny_mixtral, tokens), rtol=0, atol=1e-5)
    from_dense, _ = made(tiny_mixtral, *METHODS["quantize"], "--base", dense)
    from_mean, _ = made(tiny_mixtral, *METHODS["quantize"])
    first, second = load_file(from_dense / WEIGHTS), load_file(from_mean / WEIGHTS)
    assert first.keys() == second.keys()
    prefix = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    torch.testing.assert_close(first[prefix], second[prefix], rtol=0, atol=1e-6)


def test_a_base_of_strangers_gets_a_warning(run_cli: Any, tiny_mixtral: Path, dense: Path, tmp_path: Path) -> None:
    stranger = copy_of(dense, tmp_path / "stranger")
    tensors = {name: torch.randn(tensor.shape) for name, tensor in load_file(stranger / WEIGHTS).items()}
    save_file(tensors, stranger / WEIGHTS, {"format": "pt"})
    result = run_cli("decompose", tiny_mixtral, tmp_path / "out", "--base", stranger)
    assert result.code == 0
    assert "cosine similarity of only" in result.stderr
    assert "cosine" not in run_cli("decompose", tiny_mixtral, tmp_path / "fine", "--base", dense).stderr


def test_bits_on_top_of_ranks(
    run_cli: Any, compress: Any, tiny_mixtral: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    low_rank = compress(tiny_mixtral, "--rank", 8).path
    assert run_cli("quantize-delta", low_rank, tmp_path / "out", "--bits", 8, *GROUP).code == 0
    layers = config_of(tmp_path / "out")["quantization_config"]["layers"].values()
    assert {spec for layer in layers for role in ("gate", "up", "down") for spec in layer[role]} == {
        "quantised-low-rank:8:8:16"
    }
    assert weight_bytes(tmp_path / "out") < 0.85 * weight_bytes(low_rank)
    expected = logits(low_rank, tokens)
    error = (logits(tmp_path / "out", tokens) - expected).norm() / expected.norm()
    assert error < 0.05
    again = run_cli("quantize-delta", tmp_path / "out", tmp_path / "no", "--bits", 4, *GROUP)
    assert again.code == 3
    assert "are stored as 4 × rank 8 in 8 bits already" in again.stderr
    trimmed = compress(tiny_mixtral, "--rank", 8, "--trim", 1).path  # one expert is the base alone
    assert run_cli("quantize-delta", trimmed, tmp_path / "fewer", "--bits", 8, *GROUP).code == 0
    layer = config_of(tmp_path / "fewer")["quantization_config"]["layers"]["0"]
    assert sorted(layer["up"])[0] == "low-rank:0"
    assert run_cli("verify", tmp_path / "fewer").code == 0
    error = (logits(tmp_path / "fewer", tokens) - (whole := logits(trimmed, tokens))).norm() / whole.norm()
    assert error < 0.05
    sparse = run_cli("sparsify-delta", low_rank, tmp_path / "no", "--drop", 0.5)
    assert sparse.code == 3
    assert "are low-rank: there is nothing to drop" in sparse.stderr


def test_groups_without_a_base_stay_as_they_are(
    run_cli: Any, compress: Any, tiny_mixtral: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Where a budget is large, svd-compress leaves some groups as they were."""
    mild = compress(tiny_mixtral, "--ratio", 0.1).path
    layers = config_of(mild)["quantization_config"]["layers"]
    native = {
        (layer, role) for layer, entry in layers.items() for role in ("gate", "up", "down") if entry[role] is None
    }
    assert native or len(layers) < 3
    assert run_cli("quantize-delta", mild, tmp_path / "out", "--bits", 8, *GROUP).code == 0
    after = config_of(tmp_path / "out")["quantization_config"]["layers"]
    assert {
        (layer, role) for layer, entry in after.items() for role in ("gate", "up", "down") if entry[role] is None
    } == native
    expected = logits(mild, tokens)
    assert (logits(tmp_path / "out", tokens) - expected).norm() < 0.1 * expected.norm()


def test_more_bits_and_numbers_lose_less(run_cli: Any, made: Any, tiny_mixtral: Path) -> None:
    def error(*options: object) -> float:
        _, told = made(tiny_mixtral, *options)
        return max(e for layer in told["layers"].values() for role in layer["relative_error"].values() for e in role)

    bits = [error("--method", "ders-quantize", "--bits", bits, *GROUP) for bits in (8, 4, 3, 2, 1)]
    assert bits == sorted(bits)
    assert bits[0] < 0.02
    assert bits[-1] < 0.7
    drops = [error("--method", "ders-sparsify", "--drop", p, "--select", "magnitude") for p in (0.2, 0.5, 0.9)]
    assert drops == sorted(drops)
    random = error("--method", "ders-sparsify", "--drop", 0.5)
    assert 0.8 < random < 1.2, "an unbiased sample of half is off by as much as there is"


def test_codes_chosen_on_text_lose_less_on_it(made: Any, tiny_mixtral: Path, tokens: torch.Tensor) -> None:
    options = ("--method", "ders-quantize", "--bits", 2, *GROUP)
    before = logits(tiny_mixtral, tokens)
    plain, fed_back = (
        (logits(made(tiny_mixtral, *options, *text)[0], tokens) - before).norm() for text in ((), ("TEXT",))
    )
    assert fed_back < plain


def test_what_factors_leave_over_is_less(made: Any, tiny_mixtral: Path) -> None:
    def error(*more: object) -> float:
        _, told = made(tiny_mixtral, "--method", "ders-sparsify", "--drop", 0.9, "--select", "magnitude", *more)
        return max(e for layer in told["layers"].values() for role in layer["relative_error"].values() for e in role)

    assert error("--rank", 8) < error("--rank", 3) < error()


@pytest.mark.parametrize(
    ("name", "at"),
    sampled(
        product(("hybrid", "quantize, rounded on text", "sparsify"), (8, 25)),
        [("hybrid", 25), ("sparsify", 8)],
    ),
)
def test_killed_runs_resume_to_the_same_bytes(
    crash: CrashDriver, calibration: Any, tiny_mixtral_bf16: Path, tmp_path: Path, name: str, at: int
) -> None:
    text = calibration if METHODS[name][-1] == "TEXT" else ()
    options = [option for option in METHODS[name] if option != "TEXT"]
    if name == "hybrid":
        options[options.index("--ratio") + 1] = 0.4
    arguments = ("compress", tiny_mixtral_bf16, "--method", "d2moe", *options, *text, "--shard-size", "40kB")
    crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, at, tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1


def test_seeds(made: Any, tiny_mixtral: Path) -> None:
    sparsify = ("--method", "ders-sparsify", "--drop", 0.8)
    first, again, other = (
        weights(made(tiny_mixtral, *sparsify, *more)[0]) for more in ((), ("--seed", 0), ("--seed", 1))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("ratio", sampled([0.35, 0.5, 0.58], [0.5, 0.58]))
def test_a_hybrid_meets_its_ratio(made: Any, tiny_mixtral: Path, ratio: float) -> None:
    path, told = made(tiny_mixtral, "--method", "hybrid", "--ratio", ratio, *GROUP, "TEXT")
    assert -0.01 <= weight_bytes(path) / weight_bytes(tiny_mixtral) - (1 - ratio) <= 0
    assert told["achieved_ratio"] >= ratio


@pytest.mark.parametrize("ratio", [0.35, 0.58])
def test_a_hybrid_mixes_forms(made: Any, tiny_mixtral: Path, ratio: float) -> None:
    """At these budgets; others happen to be what one form takes everywhere."""
    path, _ = made(tiny_mixtral, "--method", "hybrid", "--ratio", ratio, *GROUP, "TEXT")
    layers = config_of(path)["quantization_config"]["layers"].values()
    assert len({spec for layer in layers for role in ("gate", "up", "down") for spec in layer[role]}) > 1


def test_a_larger_budget_loses_less(made: Any, tiny_mixtral: Path, tokens: torch.Tensor) -> None:
    before = logits(tiny_mixtral, tokens)
    errors = [
        (logits(made(tiny_mixtral, "--method", "hybrid", "--ratio", ratio, *GROUP, "TEXT")[0], tokens) - before).norm()
        for ratio in (0.35, 0.5, 0.58)
    ]
    assert errors == sorted(errors)


def test_plans_are_exact(run_cli: Any, made: Any, tiny_mixtral: Path) -> None:
    for name in ("quantize", "sparsify", "sparsify by magnitude"):
        path, _ = made(tiny_mixtral, *METHODS[name])
        plan = run_cli("compress", tiny_mixtral, "unused", *METHODS[name], "--dry-run", "--json").json
        assert plan["output_bytes"] == weight_bytes(path)


def test_what_is_added_to_the_dense_model(run_cli: Any, made: Any, tiny_mixtral: Path) -> None:
    """As the paper counts it: k bits are k / 16 of a number, the base is the dense model's FFN."""
    expert = 3 * 32 * 48
    native = run_cli("inspect", tiny_mixtral, "--json").json["parameters"]["added"]
    assert native == 3 * (4 - 1) * expert
    path, _ = made(tiny_mixtral, *METHODS["quantize"])
    assert run_cli("inspect", path, "--json").json["parameters"]["added"] == 3 * 4 * expert * 4 / 16
    path, _ = made(tiny_mixtral, *METHODS["sparsify"])
    assert run_cli("inspect", path, "--json").json["parameters"]["added"] == 3 * 4 * round(0.2 * 32 * 48) * 3


@pytest.mark.parametrize("options", [METHODS["quantize"], METHODS["sparsify"], METHODS["hybrid"]])
def test_experts_made_dense_when_loaded(
    run_cli: Any, made: Any, tiny_mixtral: Path, tiny_text: Path, options: Any
) -> None:
    path, _ = made(tiny_mixtral, *options)
    evaluate = ("eval", path, "--data", tiny_text, "--sequence-length", 64, "--windows", 4, "--json")
    loaded, running, chosen = (
        run_cli(*evaluate, *more).json for more in (("--synthesize", "load"), ("--synthesize", "on-the-fly"), ())
    )
    assert loaded["synthesized"] == chosen["synthesized"] == "load"
    assert running["synthesized"] == "on-the-fly"
    assert loaded["perplexity"] == pytest.approx(running["perplexity"], rel=1e-5)
    assert loaded["perplexity"] == chosen["perplexity"]


def test_a_damaged_packed_tensor_is_noticed(run_cli: Any, made: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    path, _ = made(tiny_mixtral, *METHODS["quantize"])
    damaged = copy_of(path, tmp_path / "damaged")
    file = damaged / WEIGHTS
    stored = load_file(file)
    name = next(name for name in stored if name.endswith(".codes"))
    tensors = {key: tensor.clone() for key, tensor in stored.items()}
    tensors[name][: len(tensors[name]) // 2] ^= 0xFF
    save_file(tensors, file, {"format": "pt"})
    result = run_cli("verify", damaged)
    assert result.code == 5
    assert f"{WEIGHTS} is not the file that was written" in result.stderr
    assert run_cli("verify", path).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--method", "ders-quantize", "--bits", 7), 2, "--bits"),
        (("--method", "ders-quantize", "--bits", 4, "--base-bits", "nf5", *GROUP), 2, "'nf4' or 'int8'"),
        (("--method", "ders-quantize", "--bits", 4, "--group-size", 0), 2, "--group-size"),
        (("--method", "ders-sparsify", "--drop", 1), 2, "--drop"),
        (("--method", "ders-sparsify", "--drop", 0.5, "--select", "best"), 2, "best"),
        (("--method", "ders-sparsify", "--base", "nowhere"), 3, "no such directory"),
        (("--method", "hybrid", "--ratio", 0.99, *GROUP, "--calibration", "x.txt"), 2, "at most 0."),
        (("--method", "nothing"), 2, "ders-quantize"),
    ],
)
def test_bad_options(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, arguments: Any, code: int, says: str) -> None:
    result = run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *arguments)
    assert result.code == code, result.stderr
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_bad_bases(run_cli: Any, tiny_mixtral: Path, dense: Path, small: Path, tmp_path: Path) -> None:
    narrow = copy_of(dense, tmp_path / "narrow")
    tensors = load_file(narrow / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, narrow / WEIGHTS, {"format": "pt"})
    result = run_cli("decompose", tiny_mixtral, tmp_path / "out", "--base", narrow)
    assert result.code == 3
    assert name in result.stderr
    assert "[47, 32]" in result.stderr
    shutil.rmtree(narrow)
    result = run_cli("decompose", tiny_mixtral, tmp_path / "out", "--base", tiny_mixtral)
    assert result.code == 3
    assert "takes what fisher-merge wrote, or the dense model that the experts were made from" in result.stderr
    result = run_cli("decompose", small, tmp_path / "out", "--base", dense)
    assert result.code == 2
    assert "already decomposed" in result.stderr
    result = run_cli("quantize-delta", tiny_mixtral, tmp_path / "out", *GROUP)
    assert result.code == 3
    assert "run decompose on it first" in result.stderr
    assert json.loads((tiny_mixtral / "config.json").read_text())["model_type"] == "mixtral"


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3"])
def with_shared(request: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose shared expert is as wide as the routed ones."""
    path = save_model(families.build(request.param), tmp_path_factory.mktemp(request.param) / "model")
    families.add_prediction_layer(path)
    return path


def test_a_shared_expert_on_the_base_loses_nothing(
    run_cli: Any, with_shared: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    split = tmp_path / "split"
    assert run_cli("decompose", with_shared, split, "--shared-expert").code == 0
    stored = load_file(split / WEIGHTS)
    assert not [name for name in stored if "shared_experts" in name and ".layers.1." in name]
    assert "model.layers.1.mlp.experts.moetool.8.gate.matrix" in stored, "after eight routed ones"
    before = logits(with_shared, tokens)
    torch.testing.assert_close(logits(split, tokens), before, rtol=0, atol=1e-5 * before.abs().max().item())
    assert run_cli("verify", split, "--against", with_shared).code == 0
    for stage in ("svd-compress", "prune-base"):
        refused = run_cli(stage, split, tmp_path / "no", "--ratio", 0.1)
        assert refused.code == 3
        assert f"{stage} works on routed ones only" in refused.stderr


EXTENDED: tuple[tuple[object, ...], ...] = (
    ("ders-quantize", "quantize-delta", ("--bits", 4, "--group-size", 8)),
    ("ders-sparsify", "sparsify-delta", ("--drop", 0.7)),
)


@pytest.mark.parametrize(
    ("with_shared", "method", "stage", "more"),
    sampled(
        ((family, *way) for family in ("glm4_moe", "deepseek_v3") for way in EXTENDED),
        [("glm4_moe", *EXTENDED[0]), ("deepseek_v3", *EXTENDED[1])],
    ),
    indirect=["with_shared"],
)
def test_the_extended_form(
    run_cli: Any, made: Any, with_shared: Path, tokens: torch.Tensor, tmp_path: Path, method: str, stage: str, more: Any
) -> None:
    options = ("--method", method, *more)
    path, _ = made(with_shared, *options, "--shared-expert")
    assert weight_bytes(path) < weight_bytes(made(with_shared, *options)[0])
    assert run_cli("decompose", with_shared, tmp_path / "split", "--shared-expert").code == 0
    assert run_cli(stage, tmp_path / "split", tmp_path / "by-hand", *more).code == 0
    assert weights(tmp_path / "by-hand") == weights(path)
    expected = logits(path, tokens)
    assert run_cli("export", path, tmp_path / "dense").code == 0
    assert load_file(tmp_path / "dense" / WEIGHTS).keys() == load_file(with_shared / WEIGHTS).keys()
    largest = expected.abs().max().item()
    torch.testing.assert_close(logits(tmp_path / "dense", tokens), expected, rtol=0, atol=2e-5 * largest)
    model = load(path)
    model.save_pretrained(tmp_path / "again")
    saved, original = load_file(tmp_path / "again" / WEIGHTS), load_file(path / WEIGHTS)
    assert set(saved) == {name for name in original if ".layers.3." not in name}
    assert all(saved[name].equal(original[name]) for name in saved)
    synthesize(model)
    with torch.inference_mode():
        dense = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(dense, expected, rtol=0, atol=2e-5 * largest)
    assert run_cli("verify", path, "--against", with_shared).code == 0
    with pytest.raises(RuntimeError, match="mismatch"):
        load(change_config(copy_of(path, tmp_path / "plain"), quantization_config=None))


def test_a_later_stage_calibrates_on_the_extended_form(
    run_cli: Any, with_shared: Path, calibration: Any, tmp_path: Path
) -> None:
    assert run_cli("decompose", with_shared, tmp_path / "split", "--shared-expert").code == 0
    options = ("--bits", 3, "--group-size", 8, *calibration)
    result = run_cli("quantize-delta", tmp_path / "split", tmp_path / "out", *options)
    assert result.code == 0, result.stderr
    assert run_cli("verify", tmp_path / "out", "--against", with_shared).code == 0


@pytest.mark.parametrize(
    ("name", "says"), [("qwen2_moe", "has shape [40, 32], theirs is [24, 32]"), ("olmoe", "OLMoE has no shared expert")]
)
def test_shared_experts_that_do_not_fit(run_cli: Any, save_model: Any, tmp_path: Path, name: str, says: str) -> None:
    source = save_model(families.build(name), tmp_path / "model")
    result = run_cli("decompose", source, tmp_path / "out", "--shared-expert")
    assert result.code == 3
    assert says in result.stderr
    assert not (tmp_path / "out").exists()
