"""PESC and SIMoE, from a dense model to a tuned one, run as a user runs it."""

import importlib.util
import json
import signal
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    change_config,
    config_of,
    contents,
    copy_of,
    load,
    load_whole,
    logits,
    python,
    relative_error,
    tensors_of,
    weight_bytes,
)
from kinds import WITHOUT_MOETOOL
from sampling import sampled
from torch import Tensor

from moetool.runtime.modules.simoe_mixing import interpolation_of

CONFIGS = Path(__file__).parent.parent / "configs"
FAMILIES = ["llama", "gemma2", "phi3", "gpt_neox", "phi", "gpt_bigcode", "falcon"]
PESC = ("--method", "pesc", "--experts", 4, "--width", 8)
SIMOE = ("--method", "simoe", "--experts", 4, "--router-width", 8, "--sparsity", 0.5)
METHODS = {"pesc": PESC, "simoe": SIMOE}
MASKS: dict[str, tuple[object, ...]] = {"simoe": ("--mask-learning-rate", 0.1)}  # of a method, for few steps
EACH = [*zip(FAMILIES, cycle(METHODS), strict=False)]  # family with a method
SHORT = ("--sequence-length", 64, "--batch-size", 2, "--learning-rate", 1e-3, "--log-every", 1)
GENERATE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    """Questions and answers."""
    words = tiny_text.read_text().split()
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    pairs = [{"prompt": " ".join(words[i : i + 5]), "completion": " ".join(words[i + 5 : i + 9])} for i in range(40)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture(scope="module")
def tuned(run_cli: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tuned(source, *options)`: the result of `moetool tune`, and what it said."""

    def run(source: Path, *options: object) -> tuple[Path, Any]:
        output = tmp_path_factory.mktemp("tuned") / "model"
        result = run_cli("tune", source, output, *SHORT, "--data", data, *options, "--json")
        assert result.code == 0, result.stderr
        return output, result.json

    return run


@pytest.fixture(scope="module")
def pesc(dense: Any, upcycle: Any) -> Path:
    return upcycle(dense("llama"), *PESC).path


@pytest.fixture(scope="module")
def simoe(dense: Any, upcycle: Any) -> Path:
    return upcycle(dense("llama"), *SIMOE).path


@pytest.fixture(scope="module")
def tuned_pesc(tuned: Any, pesc: Path) -> tuple[Path, Any]:
    return tuned(pesc, "--steps", 4)


@pytest.fixture(scope="module")
def tuned_simoe(tuned: Any, simoe: Path, tiny_text: Path) -> tuple[Path, Any]:
    return tuned(simoe, "--steps", 20, "--eval-data", tiny_text)


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if name in after and not after[name].equal(before[name])}


# -- from a dense model


@pytest.mark.parametrize(("family", "method"), sampled(product(FAMILIES, METHODS), EACH))
def test_every_family(dense: Any, upcycle: Any, run_cli: Any, tokens: Tensor, family: str, method: str) -> None:
    source = dense(family)
    made = upcycle(source, *METHODS[method])
    assert made.told["proof"]["preserves"] is True
    assert made.told["proof"]["relative_logit_error"] <= 1e-5
    before, after = load(source), load_whole(made.path)
    assert after.config.model_type == before.config.model_type
    with torch.inference_mode():
        expected = before(input_ids=tokens, use_cache=False).logits
        assert relative_error(after(input_ids=tokens, use_cache=False).logits, expected) < 1e-5
    assert after.generate(tokens[:, :6], **GENERATE).equal(before.generate(tokens[:, :6], **GENERATE))
    stored = {name: tensor for name, tensor in tensors_of(made.path).items() if tensor.shape not in ((1, 1), (1,))}
    dense_total = sum(tensor.numel() for tensor in tensors_of(source).values())
    total = sum(tensor.numel() for tensor in stored.values())
    assert made.told["parameters"]["total"] == total
    assert made.told["parameters"]["added"] == total - dense_total
    plan = run_cli("upcycle", source, made.path.parent / "plan", *METHODS[method], "--dry-run", "--json").json
    assert plan["added_parameters"] == total - dense_total
    assert plan["output_bytes"] == weight_bytes(made.path)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bytes(
    dense: Any, upcycle: Any, run_cli: Any, tmp_path: Path, method: str
) -> None:
    source = dense("llama")
    for seed in (0, 1):
        assert run_cli("upcycle", source, tmp_path / str(seed), *METHODS[method], "--seed", seed).code == 0
    first = contents(upcycle(source, *METHODS[method]).path)
    assert contents(tmp_path / "0") == first
    assert contents(tmp_path / "1")["model.safetensors"] != first["model.safetensors"]


@pytest.mark.parametrize(
    "options",
    [
        (*PESC, "--layers", "0,2", "--top-k", 1, "--scale", 0.5, "--dropout", 0),
        (*PESC, "--dtype", "float32"),
        (*SIMOE, "--dtype", "float32"),
        SIMOE,
    ],
)
def test_bf16_sources_and_other_options(dense: Any, upcycle: Any, tokens: Tensor, options: tuple[object, ...]) -> None:
    source = dense("llama", dtype=torch.bfloat16)
    made = upcycle(source, *options)
    assert relative_error(logits(made.path, tokens), logits(source, tokens)) < 1e-5
    stored = {tensor.dtype for name, tensor in tensors_of(made.path).items() if name.endswith((".delta", "up_proj"))}
    assert stored == {torch.float32 if "--dtype" in options else torch.bfloat16}


def test_routers_without_a_preference(dense: Any, upcycle: Any, calibration: Any, tokens: Tensor) -> None:
    source = dense("llama")
    made = upcycle(source, *PESC, "--center-router", *calibration)
    assert relative_error(logits(made.path, tokens), logits(source, tokens)) < 1e-5
    routers = [tensor for name, tensor in tensors_of(made.path).items() if name.endswith(".mlp.gate.weight")]
    plain = tensors_of(upcycle(source, *PESC).path)
    assert len(routers) == 3
    assert not any(tensor.equal(other) for tensor in routers for other in plain.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*PESC, "--top-k", 5), "only 4 experts"),
        (("--method", "pesc", "--width", 0), "--width"),
        (("--method", "pesc", "--dropout", 1), "--dropout"),
        (("--method", "simoe", "--sparsity", 1), "--sparsity"),
        (("--method", "simoe", "--experts", 1), "--experts"),
        ((*PESC, "--layers", "0,9"), "9"),
        (("--method", "ders-lowrank", "--rank", 33), "no more than 32"),
        (("--experts", 10**12), "10000"),
    ],
)
def test_bad_options(run_cli: Any, dense: Any, tmp_path: Path, options: tuple[object, ...], words: str) -> None:
    result = run_cli("upcycle", dense("llama"), tmp_path / "out", *options)
    assert result.code == 2, result.stderr
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", METHODS)
def test_killed_conversions_go_on_to_the_same_bytes(crash: Any, dense: Any, tmp_path: Path, method: str) -> None:
    arguments = ("upcycle", dense("llama"), *METHODS[method])
    changes = crash.whole(tmp_path / "quiet", arguments)
    for part in (3, 8):
        crash.goes_on(tmp_path / str(part), arguments, changes * part // 10, tmp_path / "quiet")


# -- costs, from the config alone

LLAMA_2_7B = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_3_2_3B = {
    "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}  # fmt: skip
STABLELM = {**LLAMA_2_7B, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
QWEN = {**STABLELM, "intermediate_size": 5504}
CODER = {**QWEN, "vocab_size": 32256}
PHI_2 = {
    "model_type": "phi", "architectures": ["PhiForCausalLM"], "vocab_size": 51200, "hidden_size": 2560,
    "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip


def plan(run_cli: Any, directory: Path, config: dict[str, Any], *options: object) -> Any:
    directory.mkdir(exist_ok=True)
    whole = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **config}
    (directory / "config.json").write_text(json.dumps(whole))
    result = run_cli("upcycle", directory, directory / "out", *options, "--dry-run", "--json")
    assert result.code == 0, result.stderr
    return result.json


def test_pesc_has_the_published_size(run_cli: Any, tmp_path: Path) -> None:
    told = plan(run_cli, tmp_path, LLAMA_2_7B, "--method", "pesc", "--experts", 8, "--width", 512)
    assert told["parameters"] == 7_813_206_016
    assert told["added_parameters"] == 32 * 8 * (2 * 512 * 4096 + 4096)
    assert told["parameters"] - told["active_parameters"] == 32 * 6 * 2 * 512 * 4096


@pytest.mark.parametrize(
    ("config", "numbers", "published"),
    [
        (LLAMA_3_2_3B, 3_212_749_824, 4.0159),
        (json.loads((CONFIGS / "llama-3-8b.json").read_text()), 8_030_261_248, 10.0378),
    ],
)
def test_simoe_has_the_published_sizes(
    run_cli: Any, tmp_path: Path, config: dict[str, Any], numbers: int, published: float
) -> None:
    """Which are a share of all numbers. What tuning leaves is less: embeddings and norms have no masks."""
    told = plan(run_cli, tmp_path, config, "--method", "simoe")
    assert told["parameters_as_published"] == numbers + numbers // 4
    assert round(told["parameters_as_published"] / 1e9, 4) == published
    hidden, width, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    linears = layers * (3 * hidden * width + 2 * hidden * hidden + 2 * hidden * 1024)
    assert told["parameters_after_tuning"] == numbers + linears // 4
    masks = layers * 8 * (6 * hidden + width)
    router = 64 * (hidden + 1) + 8 * (64 + 1)
    assert told["added_parameters"] == linears + masks + router
    assert told["parameters"] == numbers + linears + masks + router


SPARSE, LOWRANK = "--method ders-sparse --drop", "--method ders-lowrank --rank"


def added(run_cli: Any, directory: Path, config: dict[str, Any], layers: int, options: str) -> tuple[int, int]:
    """Parameters that four experts add, and how many of these a universal FFN beside them has."""
    arguments = ("--experts", 4, "--target", "moetool", *options.split())
    told = plan(run_cli, directory, config, *arguments)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    network = 2 * hidden * width + hidden + width if config is PHI_2 else 3 * hidden * width
    return told["added_parameters"], layers * network if "--shared" in options else 0


def is_published(parameters: float, published: str) -> bool:
    """Whether it is the published number, rounded or cut to its digits."""
    digits = len(published.rstrip("MB").partition(".")[2])
    found = parameters / {"M": 1e6, "B": 1e9}[published[-1]]
    return abs(found - float(published[:-1])) < 10**-digits


@pytest.mark.parametrize(
    ("config", "options", "published"),
    [
        # Table 1, MoE-LLaVA.
        (STABLELM, "", "1.24B"),
        (STABLELM, f"{SPARSE} 0.9999", "0.26M"),
        (STABLELM, f"{LOWRANK} 1", "1.20M"),
        (QWEN, "", "1.22B"),
        (QWEN, f"{SPARSE} 0.9999", "0.26M"),
        (QWEN, f"{LOWRANK} 1", "1.19M"),
        (PHI_2, "", "2.52B"),
        (PHI_2, f"{SPARSE} 0.9999", "1.11M"),
        (PHI_2, f"{LOWRANK} 1", "2.42M"),
        # Table 2, Med-MoE: beside a universal FFN.
        (STABLELM, "--shared half", "1.24B"),
        (STABLELM, f"{LOWRANK} 1 --shared half", "1.20M"),
        (PHI_2, "--shared half", "2.52B"),
        (PHI_2, f"{SPARSE} 0.9999 --shared half", "1.11M"),
        (PHI_2, f"{LOWRANK} 1 --shared half", "2.42M"),
    ],
)
def test_what_ders_adds_in_every_other_layer(
    run_cli: Any, tmp_path: Path, config: dict[str, Any], options: str, published: str
) -> None:
    total, universal = added(
        run_cli, tmp_path, config, 12 if config is not PHI_2 else 16, f"--layers every:2 {options}"
    )
    assert is_published(total - universal, published), total - universal
    if universal:
        assert is_published(universal, "0.42B" if config is STABLELM else "0.84B")


@pytest.mark.parametrize(
    ("options", "published"),
    [
        # Table 3, and those of Table 4.
        ("", "2.43B"),
        (f"{SPARSE} 0.9999", "0.72M"),
        (f"{SPARSE} 0.999", "3.64M"),
        (f"{SPARSE} 0.99", "32.9M"),
        (f"{SPARSE} 0.9", "325M"),
        (f"{LOWRANK} 1", "2.57M"),
        (f"{LOWRANK} 4", "9.09M"),
        (f"{LOWRANK} 16", "35.2M"),
        (f"{LOWRANK} 64", "140M"),
    ],
)
def test_what_ders_adds_to_coder_moe(run_cli: Any, tmp_path: Path, options: str, published: str) -> None:
    """Its routers have twice as many rows as there are experts."""
    total, universal = added(run_cli, tmp_path, CODER, 24, f"--shared half --top-k 1 {options}")
    more_rows = 24 * 4 * CODER["hidden_size"]
    assert is_published(universal, "0.81B")
    assert is_published(total - universal + more_rows, published), total - universal + more_rows


# -- what others make of it


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("command", ["compress", "decompose", "fisher-merge", "export", "export --format dense"])
def test_compression_and_export_do_not_take_them(
    run_cli: Any, pesc: Path, simoe: Path, calibration: Any, tmp_path: Path, command: str, method: str
) -> None:
    source = {"pesc": pesc, "simoe": simoe}[method]
    name, *options = command.split()
    options = {"compress": ["--ratio", 0.3, *calibration], "fisher-merge": calibration}.get(name, options)
    result = run_cli(name, source, tmp_path / "out", *options)
    assert result.code == 3, result.stderr
    assert {"pesc": "adapters (PESC)", "simoe": "masks on its own weights (SIMoE)"}[method] in result.stderr
    assert "This checkpoint (llama) is a model whose experts are" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", METHODS)
def test_they_are_not_upcycled_again(run_cli: Any, pesc: Path, simoe: Path, tmp_path: Path, method: str) -> None:
    for source in (pesc, simoe):
        result = run_cli("upcycle", source, tmp_path / "out", *METHODS[method])
        assert result.code == 3, result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", METHODS)
def test_verify_eval_and_inspect_take_them(
    run_cli: Any, pesc: Path, simoe: Path, dense: Any, upcycle: Any, tiny_text: Path, tmp_path: Path, method: str
) -> None:
    source = {"pesc": pesc, "simoe": simoe}[method]
    assert run_cli("verify", source, "--json").code == 0
    shown = run_cli("inspect", source)
    assert shown.code == 0
    fields = shown.stdout.partition("┏")[0].splitlines()
    assert all(line[12:14] == "  " and line[14] != " " for line in fields)
    told, made = run_cli("inspect", source, "--json").json, upcycle(dense("llama"), *METHODS[method]).told["parameters"]
    assert {name: told["parameters"][name] for name in made} == made
    assert (told["experts"], told["moe_layers"], told["hidden_size"], told["intermediate_size"]) == (4, 3, 32, 48)
    found = [run_cli("eval", path, "--data", tiny_text, "--json") for path in (source, dense("llama"))]
    assert [result.code for result in found] == [0, 0], found[0].stderr
    assert found[0].json["perplexity"] == pytest.approx(found[1].json["perplexity"], rel=1e-5)
    broken = copy_of(source, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert run_cli("verify", broken).code == 5


@pytest.mark.parametrize("method", METHODS)
def test_without_their_entry_they_do_not_load(pesc: Path, simoe: Path, tmp_path: Path, method: str) -> None:
    path = copy_of({"pesc": pesc, "simoe": simoe}[method], tmp_path / "plain")
    change_config(path, quantization_config=None)
    with pytest.raises(RuntimeError, match="mismatch"):
        load(path)


# -- tuning


def test_tuning_pesc_trains_adapters_and_routers(tuned_pesc: tuple[Path, Any], pesc: Path, tokens: Tensor) -> None:
    output, told = tuned_pesc
    before, after = tensors_of(pesc), tensors_of(output)
    assert after.keys() == before.keys()
    assert config_of(output) == config_of(pesc)
    trained = {name for name in before if ".adapters." in name or name.endswith(".mlp.gate.weight")}
    assert changed(before, after) == trained
    assert told["trained_parameters"] == sum(before[name].numel() for name in trained)
    assert relative_error(logits(output, tokens), logits(pesc, tokens)) > 1e-4


def test_tuning_simoe_closes_masks_and_leaves_out_what_they_close(
    tuned_simoe: tuple[Path, Any], simoe: Path, tokens: Tensor
) -> None:
    output, told = tuned_simoe
    before, after = tensors_of(simoe), tensors_of(output)
    assert told["mask_sparsity"] == pytest.approx(0.5, abs=1e-3)
    kept = {name for name in before if name in after}
    assert set(before) - kept == {name for name in before if name.endswith((".log_phi", ".multiplier"))}
    assert {name.rpartition(".")[2] for name in set(after) - kept} == {"columns", "fixed_gates"}
    assert changed(before, after) == {name for name in kept if name.endswith(".delta") or ".interpolation." in name}
    linears = [name for name in kept if name.endswith(".linear.weight")]
    assert len(linears) == 3 * 7
    channels = config_of(output)["quantization_config"]["interpolated"]["channels"]
    for name in linears:
        site = name.removesuffix(".linear.weight")
        gates, columns = after[f"{site}.fixed_gates"], after[f"{site}.columns"]
        assert after[f"{site}.delta"].shape == (len(after[name]), channels[site])
        assert gates.shape == (4, channels[site])
        assert (gates != 0).any(0).all()
        assert columns.tolist() == sorted(set(columns.tolist()))
    model = load_whole(output)
    router = interpolation_of(model)
    assert router is not None
    assert not router.trains_masks
    assert relative_error(logits(output, tokens), logits(simoe, tokens)) > 1e-4
    trained = sum(before[name].numel() for name in before if name.endswith((".delta", ".log_phi")))
    trained += sum(before[name].numel() for name in before if ".interpolation." in name and "multiplier" not in name)
    assert told["trained_parameters"] == trained


@pytest.mark.parametrize("which", METHODS)
def test_what_was_tuned_is_evaluated_and_generates(
    run_cli: Any,
    tuned_pesc: tuple[Path, Any],
    tuned_simoe: tuple[Path, Any],
    tokens: Tensor,
    tiny_text: Path,
    which: str,
) -> None:
    output, told = {"pesc": tuned_pesc, "simoe": tuned_simoe}[which]
    model = load_whole(output)
    found = model.generate(tokens[:, :6], attention_mask=torch.ones(2, 6, dtype=torch.long), **GENERATE)
    assert found.shape == (2, 12)
    assert run_cli("verify", output).code == 0
    assert run_cli("inspect", output).code == 0
    result = run_cli("eval", output, "--data", tiny_text, "--sequence-length", 64, "--json")
    assert result.code == 0, result.stderr
    if which == "simoe":
        assert result.json["perplexity"] == pytest.approx(told["eval_perplexity"], rel=0.05)


def test_masks_that_are_found_stay(tuned: Any, tuned_simoe: tuple[Path, Any]) -> None:
    once, _ = tuned_simoe
    twice, told = tuned(once, "--steps", 3)
    before, after = tensors_of(once), tensors_of(twice)
    assert after.keys() == before.keys()
    assert config_of(twice) == config_of(once)
    learnt = {name for name in before if name.endswith(".delta") or ".interpolation." in name}
    assert changed(before, after) == {name for name in learnt if before[name].numel()}
    assert "mask_sparsity" not in told


@pytest.mark.parametrize(
    "options",
    [
        ("--gradient-checkpointing",),
        ("--sample-masks", "--no-packing"),
        ("--accumulation", 2, "--overlap", 1e-3, "--mask-learning-rate", 0.2),
        ("--bf16",),
    ],
)
def test_other_ways_to_tune_simoe(tuned: Any, simoe: Path, options: tuple[object, ...]) -> None:
    output, told = tuned(simoe, "--steps", 3, "--mask-learning-rate", 0.1, *options)
    assert told["steps"] == 3
    changes = changed(tensors_of(simoe), tensors_of(output))
    assert changes
    assert all(name.endswith(".delta") or ".interpolation." in name for name in changes)


def test_masks_that_have_all_closed_are_refused(run_cli: Any, simoe: Path, data: Path, tmp_path: Path) -> None:
    """What they left could only end there again: nothing is kept, and a command with other options can start."""
    output = tmp_path / "closed"
    arguments = ("tune", simoe, output, *SHORT, "--data", data, "--steps", 2)
    result = run_cli(*arguments, "--mask-learning-rate", 9)
    assert result.code == 5
    assert "All masks have closed" in result.stderr
    assert "Start again with more --steps, or with a lower --mask-learning-rate" in result.stderr
    assert "(here 2, 9 and 2)" in result.stderr
    assert "--resume" not in result.stderr
    assert not output.exists()
    assert run_cli(*arguments, "--mask-learning-rate", 0.1).code == 0


def test_how_many_steps_leave_masks_open_is_said(run_cli: Any, simoe: Path, data: Path, tmp_path: Path) -> None:
    """At the default rate, which follows from their number."""
    arguments = ("tune", simoe, tmp_path / "out", *SHORT, "--data", data)
    few = run_cli(*arguments, "--steps", 3)
    assert few.code == 5
    assert "Start again with more --steps (4 at least), or" in few.stderr
    assert run_cli(*arguments, "--steps", 4).code == 0


def test_recomputed_activations_train_the_same(tuned: Any, pesc: Path, simoe: Path, dense: Any, upcycle: Any) -> None:
    still = upcycle(dense("llama"), *PESC, "--dropout", 0).path
    for source, masks in ((still, ()), (simoe, MASKS["simoe"])):
        plain, again = (
            tensors_of(tuned(source, "--steps", 3, *masks, *more)[0]) for more in ((), ("--gradient-checkpointing",))
        )
        for name, tensor in plain.items():
            assert torch.allclose(tensor.float(), again[name].float(), atol=1e-5), name


@pytest.mark.parametrize(
    ("method", "family"),
    sampled(
        product(METHODS, ("gpt_neox", "gpt_bigcode", "falcon", "gemma2")),
        [
            ("pesc", "gpt_bigcode"),
            ("simoe", "gpt_neox"),
        ],
    ),
)
def test_other_families_are_tuned(
    tuned: Any, dense: Any, upcycle: Any, tokens: Tensor, family: str, method: str
) -> None:
    source = upcycle(dense(family), *METHODS[method]).path
    output, _ = tuned(source, "--steps", 8, *MASKS.get(method, ()))
    assert relative_error(logits(output, tokens), logits(source, tokens)) > 1e-5
    load_whole(output)


@pytest.mark.parametrize(
    ("which", "tenths"),
    sampled(
        product(("pesc", "pesc with lora", "simoe", "tuned simoe"), (2, 6)),
        [("simoe", 2)],
    ),
)
def test_a_stopped_tuning_goes_on_to_the_same_bytes(
    crash: Any,
    pesc: Path,
    simoe: Path,
    tuned_simoe: tuple[Path, Any],
    data: Path,
    tmp_path: Path,
    which: str,
    tenths: int,
) -> None:
    source = pesc if which.startswith("pesc") else simoe if which == "simoe" else tuned_simoe[0]
    more = ("--lora-rank", 2) if "lora" in which else ()
    arguments = (
        "tune",
        source,
        *SHORT,
        "--data",
        data,
        "--steps",
        6,
        "--save-every",
        2,
        *(() if source == pesc else MASKS["simoe"]),
        *more,
    )
    changes = crash.whole(tmp_path / "quiet", arguments)
    output, sent = tmp_path / "out", {"sent": "SIGTERM"} if tenths == 2 else {}
    assert crash(output, arguments, at=changes * tenths // 10, **sent)["code"] in (75, -signal.SIGKILL)
    assert not (output / "config.json").exists()
    last = crash(output, (*arguments, "--resume"))
    assert last["code"] == 0, last["stderr"]
    assert contents(output) == contents(tmp_path / "quiet")


def test_factors_on_the_rest_of_pesc(tuned: Any, pesc: Path, tokens: Tensor) -> None:
    output, told = tuned(pesc, "--steps", 4, "--lora-rank", 2)
    before, after = tensors_of(pesc), tensors_of(output)
    assert after.keys() == before.keys()
    linears = {name for name in before if name.endswith("_proj.weight") and before[name].numel() > 1}
    experts = {name for name in before if ".adapters." in name or name.endswith(".mlp.gate.weight")}
    assert changed(before, after) == linears | experts
    for name in linears:
        difference = after[name] - before[name]
        assert torch.linalg.matrix_rank(difference.double(), rtol=1e-3) <= 2, name
    factors = 2 * sum(sum(before[name].shape) for name in linears)
    assert told["trained_parameters"] == factors + sum(before[name].numel() for name in experts)


@pytest.mark.parametrize(
    ("which", "options", "rate"),
    [
        ("pesc", (), 2e-4),
        ("pesc", ("--lora-rank", 2), 2e-4),
        ("pesc", ("--train", "all"), 2e-5),
        ("pesc", ("--learning-rate", 1e-3), 1e-3),
        ("dense", ("--lora-rank", 2), 2e-4),
        ("dense", (), 2e-5),
        ("vanilla", ("--lora-rank", 2), 2e-5),
        ("vanilla", ("--train", "lora"), 2e-4),
        ("simoe", (), 2e-5),
    ],
)
def test_what_begins_at_zero_learns_at_a_rate_of_its_own(
    run_cli: Any, dense: Any, upcycle: Any, data: Path, tmp_path: Path, which: str, options: Any, rate: float
) -> None:
    """Unless one is given, or weights are trained with it."""
    made = {**METHODS, "vanilla": ("--experts", 4)}
    source = dense("llama") if which == "dense" else upcycle(dense("llama"), *made[which]).path
    always = ("--sequence-length", 64, "--batch-size", 2, "--log-every", 1, "--steps", 4, "--schedule", "constant")
    told = run_cli("tune", source, tmp_path / "out", "--data", data, *always, "--warmup", 0, *options, "--json")
    assert told.code == 0 or which == "simoe", told.stderr
    assert f"learning rate {rate:.4g}" in told.stderr


def test_factors_follow_from_the_seed(tuned: Any, pesc: Path) -> None:
    """And not from what was drawn before in the same process."""
    found = []
    for seed in (1, 1, 2):
        torch.rand(1)
        found.append(contents(tuned(pesc, "--steps", 2, "--lora-rank", 2, "--seed", seed)[0]))
    assert found[0] == found[1]
    assert found[0]["model.safetensors"] != found[2]["model.safetensors"]


def test_factors_on_a_dense_model(tuned: Any, dense: Any) -> None:
    source = dense("llama")
    output, told = tuned(source, "--steps", 4, "--lora-rank", 2)
    before, after = tensors_of(source), tensors_of(output)
    linears = {name for name in before if name.endswith("_proj.weight")}
    assert changed(before, after) == linears
    assert told["trained_parameters"] == 2 * sum(sum(before[name].shape) for name in linears)


def test_factors_beside_the_experts_of_a_mixtral(tuned: Any, tiny_mixtral: Path) -> None:
    output, _ = tuned(tiny_mixtral, "--steps", 4, "--lora-rank", 2)
    before, after = tensors_of(tiny_mixtral), tensors_of(output)
    changes = changed(before, after)
    assert {name for name in before if "self_attn" in name} <= changes
    assert all("self_attn" in name or "block_sparse_moe" in name for name in changes)
    assert after.keys() == before.keys()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [(), ("--lora-rank", 2), ("--eval-every", 2)])
def test_what_is_evaluated_in_the_end_is_what_is_written(
    tuned: Any, dense: Any, upcycle: Any, tiny_text: Path, options: tuple[object, ...]
) -> None:
    """Not the quantized layers, which only the training has."""
    source = upcycle(dense("llama", hidden_size=64, intermediate_size=128), *PESC).path
    output, told = tuned(source, "--steps", 2, "--quantize-base", "nf4", "--eval-data", tiny_text, *options)
    again = tuned(output, "--steps", 1, "--learning-rate", 1e-30, "--eval-data", tiny_text)[1]
    assert told["eval_loss"] == pytest.approx(again["eval_loss"], abs=1e-5)
    assert told["curve"][-1]["eval_loss"] == pytest.approx(told["eval_loss"], abs=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("which", "kind"),
    sampled(product(("pesc", "simoe", "dense"), ("nf4", "int8")), [("pesc", "nf4"), ("simoe", "int8")]),
)
def test_a_base_in_few_bits_is_written_whole(tuned: Any, dense: Any, upcycle: Any, which: str, kind: str) -> None:
    """Without factors not a bit of it has changed; with them it is the source and what they learnt."""
    source = dense("llama", hidden_size=64, intermediate_size=128)
    if which != "dense":
        source = upcycle(source, *METHODS[which]).path
    before = tensors_of(source)
    linears = {
        name for name in before if name.endswith(("_proj.weight", ".linear.weight")) and before[name].numel() > 1
    }
    if which != "dense":
        after = tensors_of(tuned(source, "--steps", 2, *MASKS.get(which, ()), "--quantize-base", kind)[0])
        assert all(after[name].equal(before[name]) for name in linears)
        assert changed(before, after)
    if which != "simoe":
        after = tensors_of(tuned(source, "--steps", 2, "--quantize-base", kind, "--lora-rank", 2)[0])
        for name in linears:
            difference = (after[name] - before[name]).double()
            assert 0 < torch.linalg.matrix_rank(difference, rtol=1e-2) <= 2, name


@pytest.mark.parametrize(
    ("which", "options", "words"),
    [
        ("dense", ("--quantize-base", "nf4"), "Upcycle it first"),
        ("simoe", ("--train", "all"), "--train all"),
        ("simoe", ("--lora-rank", 2), "--lora-rank"),
        ("tuned simoe", ("--lora-rank", 2), "--lora-rank"),
        ("pesc", ("--lora-rank", 2, "--train", "all"), "--lora-rank"),
        ("simoe", ("--freeze-shared",), "--freeze-shared"),
        ("pesc", ("--freeze-shared",), "--freeze-shared"),
        ("pesc", ("--lora-rank", 0), "--lora-rank"),
    ],
)
def test_what_cannot_be_trained(
    run_cli: Any, dense: Any, pesc: Path, simoe: Path, tuned_simoe: tuple[Path, Any], data: Path, tmp_path: Path,
    which: str, options: tuple[object, ...], words: str,
) -> None:  # fmt: skip
    source = {"pesc": pesc, "simoe": simoe, "tuned simoe": tuned_simoe[0], "dense": dense("llama")}[which]
    result = run_cli("tune", source, tmp_path / "out", *SHORT, "--data", data, *options)
    assert result.code == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.exhaustive
def test_without_moetool_nothing_loads(dense: Any, upcycle: Any) -> None:
    paths = [upcycle(dense(family), *METHODS[method]).path for family, method in EACH]
    found = python("-c", WITHOUT_MOETOOL, *paths, dense("llama"))
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["refused"] * len(EACH) + ["loaded"]
