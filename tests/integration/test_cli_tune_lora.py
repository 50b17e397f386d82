"""`moetool tune --train lora`: low-rank factors of attention and experts, merged at the end; routers in full."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from around_families import AROUND
from checkpoints import change_tensors, contents, copy_of, tensors_of
from sampling import sampled

from moetool.tune.low_rank import adapted, factor_numbers
from moetool.tune.trainer import MoETrainer

SHORT = ("--sequence-length", 32, "--batch-size", 4, "--learning-rate", 1e-2, "--steps", 3)
LORA = ("--train", "lora", "--lora-rank", 2)


@pytest.fixture(scope="module")
def short_text(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(tiny_text.read_text()[:6000])
    return path


def test_every_matrix_changes_by_few_directions(
    run_cli: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path
) -> None:
    """Of attention and of each expert for itself; routers change as they like, norms and embeddings not at all."""
    result = run_cli("tune", tiny_mixtral, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA, "--json")
    assert result.code == 0, result.stderr
    before, after = tensors_of(tiny_mixtral), tensors_of(tmp_path / "tuned")
    assert after.keys() == before.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    routers = {name for name in before if name.endswith("gate.weight")}
    matrices = {name for name in before if ".experts." in name or ".self_attn." in name}
    assert changed == routers | matrices
    for name in matrices:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-3) <= 2, name
    own = sum(before[name].numel() for name in routers)
    sides = sum(sum(before[name].shape) for name in matrices)
    shared = sum(before[name].shape[1] for name in matrices if name.endswith("w1.weight"))  # gate and up are one
    assert result.json["trained_parameters"] == own + 2 * (sides - shared)


@pytest.mark.parametrize(
    "family", sampled(("qwen2_moe", "gpt_oss", "granitemoe", "deepseek_v3", "longcat_flash"), ("deepseek_v3",))
)
def test_other_families(run_cli: Any, save_model: Any, short_text: Path, family: str, tmp_path: Path) -> None:
    source = save_model(families.build(family), tmp_path / "model")
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("experts" in name or "input_linear" in name for name in changed)
    assert any("attn" in name or "attention" in name for name in changed)
    assert not [name for name in changed if "norm" in name or "embed" in name or "lm_head" in name]


def test_a_rank_beside_experts_that_are_trained_in_full(
    run_cli: Any, save_model: Any, short_text: Path, tmp_path: Path
) -> None:
    """`--lora-rank` alone adapts shared experts, too, and adds nothing to the experts."""
    source = save_model(families.build("deepseek_v3"), tmp_path / "model")
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, "--lora-rank", 2, "--json")
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    shared = [name for name in before if ".shared_experts." in name]
    assert shared
    assert changed >= set(shared)
    for name in shared:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-3) <= 2, name
    full = sum(before[name].numel() for name in before if ".mlp.experts." in name or name.endswith("gate.weight"))
    linears = {name for name in before if ("attn" in name or ".mlp." in name) and before[name].dim() == 2}
    linears -= {name for name in before if ".mlp.experts." in name or name.endswith("gate.weight")}
    assert result.json["trained_parameters"] == full + 2 * sum(sum(before[name].shape) for name in linears)


def test_biases_that_balance_are_written_too(run_cli: Any, save_model: Any, short_text: Path, tmp_path: Path) -> None:
    source = save_model(families.build("deepseek_v3"), tmp_path / "model")
    arguments = ("--data", short_text, *SHORT, *LORA, "--balance-bias", 0.01)
    result = run_cli("tune", source, tmp_path / "tuned", *arguments)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases
    assert not any(before[name].equal(after[name]) for name in biases)


def test_an_eye_whose_router_has_no_bias_is_nothing_against_it(
    run_cli: Any, save_model: Any, short_text: Path, tmp_path: Path
) -> None:
    source = save_model(families.build("dots3_note", **AROUND["dots3_note"]), tmp_path / "model")
    arguments = ("--data", short_text, *SHORT, *LORA, "--balance-bias", 0.01)
    result = run_cli("tune", source, tmp_path / "tuned", *arguments)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert any(not before[name].equal(after[name]) for name in biases)


def test_experts_that_are_deltas_are_trained_themselves(
    run_cli: Any, dense: Any, upcycle: Any, short_text: Path, tmp_path: Path
) -> None:
    source = upcycle(dense("llama"), "--method", "ders-lowrank").path
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".experts." in name for name in changed)
    for name in (name for name in changed if ".self_attn." in name):
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-3) <= 2, name


@pytest.mark.parametrize("made", ["phi", "gpt2", "moefied"])
def test_experts_in_full_in_modules_of_moetools_own(
    run_cli: Any, dense: Any, upcycle: Any, tiny_text: Path, short_text: Path, tmp_path: Path, made: str
) -> None:
    if made == "moefied":
        source, few = tmp_path / "moefied", ("--samples", 8, "--sequence-length", 32)
        result = run_cli("moefy", dense("llama"), source, "--keep", 0.5, "--calibration", tiny_text, *few)
        assert result.code == 0, result.stderr
    else:
        source = upcycle(dense(made), "--method", "vanilla").path
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".mlp." in name for name in changed)
    assert any("attn" in name for name in changed)
    for name in changed:
        rank = torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-3)
        assert name.endswith("gate.weight") or rank.max() <= 2, name


def test_a_dense_model_gets_factors_alone(run_cli: Any, dense: Any, short_text: Path, tmp_path: Path) -> None:
    """As many as with `--lora-rank` alone, of the same matrices."""
    found, source = [], dense("llama")
    before = tensors_of(source)
    for number, options in enumerate((LORA, ("--lora-rank", 2))):
        output = tmp_path / str(number)
        result = run_cli("tune", source, output, "--data", short_text, *SHORT, *options, "--json")
        assert result.code == 0, result.stderr
        after = tensors_of(output)
        changed = {name for name in before if not before[name].equal(after[name])}
        assert changed == {name for name in before if name.endswith("_proj.weight")}
        found.append(result.json["trained_parameters"])
    assert found[0] == found[1]


def test_matrices_that_lie_transposed_get_factors(run_cli: Any, dense: Any, short_text: Path, tmp_path: Path) -> None:
    source = dense("gpt2")
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if ".h." in name and before[name].dim() == 2}
    for name in changed:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-3) <= 2, name


def test_the_default_rate_is_ten_times_that_of_numbers(
    run_cli: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path
) -> None:
    for options, rate in (((), 2e-5), (("--train", "lora"), 2e-4)):
        few = ("--sequence-length", 32, "--steps", 1, "--log-every", 1, "--schedule", "constant", "--warmup", 0)
        output = tmp_path / f"{rate}"
        result = run_cli("tune", tiny_mixtral, output, "--data", short_text, *few, *options, "--json")
        assert result.code == 0, result.stderr
        assert result.json["curve"][0]["learning_rate"] == pytest.approx(rate)


def test_a_model_in_bf16_is_held_so(run_cli: Any, tiny_mixtral_bf16: Path, short_text: Path, tmp_path: Path) -> None:
    """With --bf16: in half of the memory, to about the same loss; what is not trained stays to the bit."""
    found, planned = [], []
    for more in ((), ("--bf16",)):
        arguments = (
            "tune",
            tiny_mixtral_bf16,
            tmp_path / f"out{len(more)}",
            "--data",
            short_text,
            "--eval-data",
            short_text,
        )
        plan = run_cli(*arguments, *SHORT, *LORA, *more, "--dry-run", "--json")
        result = run_cli(*arguments, *SHORT, *LORA, *more, "--json")
        assert result.code == 0, result.stderr
        found.append(result.json["eval_loss"])
        planned.append(plan.json["peak_memory_bytes"])
    assert found[1] == pytest.approx(found[0], rel=0.01)
    assert planned[1] < planned[0]
    before, after = tensors_of(tiny_mixtral_bf16), tensors_of(tmp_path / "out1")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".experts." in name for name in changed)
    assert any("gate" in name for name in changed)
    assert not [name for name in changed if "norm" in name or "embed" in name or "lm_head" in name]


@pytest.mark.parametrize("streams", [False, True])
def test_a_router_in_fp32_is_trained_from_its_own_numbers(
    run_cli: Any,
    tiny_mixtral: Path,
    tiny_mixtral_bf16: Path,
    short_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    streams: bool,
) -> None:
    """Of a model that is otherwise in bf16, and is held so."""
    if streams:
        monkeypatch.setattr("moetool.tune.stage.usable_bytes", lambda options: 0)
    exact = {name: own for name, own in tensors_of(tiny_mixtral).items() if name.endswith("gate.weight")}
    source = change_tensors(copy_of(tiny_mixtral_bf16, tmp_path / "model"), lambda tensors: tensors.update(exact))
    arguments = ("--data", short_text, *SHORT, *LORA, "--bf16", "--learning-rate", 1e-6)
    result = run_cli("tune", source, tmp_path / "tuned", *arguments)
    assert result.code == 0, result.stderr
    after = tensors_of(tmp_path / "tuned")
    for name, own in exact.items():
        assert 0 < (after[name] - own).abs().max() < 1e-5, name


@pytest.mark.parametrize("family", sampled(("gpt_oss", "granitemoe", "deepseek_v3", "qwen3_next"), ("deepseek_v3",)))
def test_other_families_in_bf16(run_cli: Any, save_model: Any, short_text: Path, family: str, tmp_path: Path) -> None:
    source = save_model(families.build(family, dtype=torch.bfloat16), tmp_path / "model")
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA, "--bf16")
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    experts = [name for name in before if "experts" in name or "input_linear" in name]
    assert any(not before[name].equal(after[name]) for name in experts)
    assert all(after[name].dtype == before[name].dtype for name in before)


def test_killed_and_resumed_it_is_the_same(crash: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path) -> None:
    arguments = ("tune", tiny_mixtral, "--data", short_text, *SHORT, *LORA, "--save-every", 1)
    crash.whole(tmp_path / "undisturbed", arguments)
    crash.goes_on(tmp_path / "killed", arguments, 20, tmp_path / "undisturbed")


def test_larger_than_memory_it_reads_layer_by_layer(
    run_cli: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bytes; `--memory` decides, and the plan says so."""
    found, arguments = [], ("tune", tiny_mixtral, "--data", short_text, *SHORT, *LORA)
    for streams in (False, True):
        if streams:
            monkeypatch.setattr("moetool.tune.stage.usable_bytes", lambda options: 0)
        output = tmp_path / str(streams)
        plan = run_cli(*arguments[:2], output, *arguments[2:], "--dry-run", "--json").json
        assert ("read layer by layer" in plan.get("weights", "")) is streams
        result = run_cli(*arguments[:2], output, *arguments[2:], "--eval-data", short_text, "--json")
        assert result.code == 0, result.stderr
        told = result.json
        found.append((contents(output)["model.safetensors"], told["eval_loss"], told["trained_parameters"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", sampled(("gpt_oss", "granitemoe", "deepseek_v3", "llama"), ("deepseek_v3",)))
def test_other_families_are_read_in_bf16(
    run_cli: Any,
    save_model: Any,
    dense: Any,
    short_text: Path,
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moetool.tune.stage.usable_bytes", lambda options: 0)
    source = (
        dense("llama")
        if family == "llama"
        else save_model(families.build(family, dtype=torch.bfloat16), tmp_path / "model")
    )
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA, "--bf16")
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    assert any(not before[name].equal(after[name]) for name in before)
    assert all(after[name].dtype == before[name].dtype for name in before)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("done", [2, 3])
def test_it_goes_on_after_an_error(
    run_cli: Any,
    tiny_mixtral: Path,
    short_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    streams: bool,
    done: int,
) -> None:
    """In the middle of its steps, or after the last, to the same bytes."""
    if streams:
        monkeypatch.setattr("moetool.tune.stage.usable_bytes", lambda options: 0)
    arguments = ("--data", short_text, *SHORT, *LORA, "--save-every", 1)
    assert run_cli("tune", tiny_mixtral, tmp_path / "whole", *arguments).code == 0
    with monkeypatch.context() as broken:
        if done == 3:
            broken.setattr("moetool.tune.writing.write_changed", _fails)
        else:
            step = MoETrainer.training_step
            broken.setattr(
                MoETrainer,
                "training_step",
                lambda own, *given: _fails() if own.state.global_step == done else step(own, *given),
            )
        assert run_cli("tune", tiny_mixtral, tmp_path / "broken", *arguments).code != 0
    result = run_cli("tune", tiny_mixtral, tmp_path / "broken", *arguments, "--resume")
    assert result.code == 0, result.stderr
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def _fails(*_: object) -> None:
    raise OSError("for the test")


def test_it_takes_less_memory_than_training_all(
    run_cli: Any, tiny_mixtral: Path, short_text: Path, tmp_path: Path
) -> None:
    found = []
    for train in ("all", "lora"):
        result = run_cli(
            "tune", tiny_mixtral, tmp_path / "out", "--data", short_text, "--train", train, "--dry-run", "--json"
        )
        assert result.code == 0, result.stderr
        found.append(result.json["peak_memory_bytes"])
    assert found[1] < found[0]


@pytest.mark.parametrize("streams", [False, True])
def test_what_sees_and_hears_stays_as_it_is(
    run_cli: Any, save_model: Any, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Text alone never reaches it: it gets no factors, and its router is not trained."""
    if streams:
        monkeypatch.setattr("moetool.tune.stage.usable_bytes", lambda options: 0)
    model = families.build("dots3_note", **AROUND["dots3_note"])
    source = save_model(model, tmp_path / "model")
    result = run_cli("tune", source, tmp_path / "tuned", "--data", short_text, *SHORT, *LORA, "--json")
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".experts." in name for name in changed)
    assert not [name for name in changed if "vision" in name or "audio" in name]
    language = model.model.language_model.requires_grad_(False)
    routers = sum(own.numel() for name, own in language.named_parameters() if name.endswith("gate.weight"))
    factors = sum(factor_numbers(shape, 2) for shape in adapted(model.requires_grad_(False), 2).values())
    assert result.json["trained_parameters"] == routers + factors


def test_a_rank_that_no_matrix_has_is_refused(run_cli: Any, dense: Any, short_text: Path, tmp_path: Path) -> None:
    """Before anything is read: nothing would be trained of a dense model."""
    arguments = ("--data", short_text, "--train", "lora", "--lora-rank", 32)
    result = run_cli("tune", dense("llama"), tmp_path / "tuned", *arguments, "--dry-run")
    assert result.code == 2
    assert "--lora-rank 32: no frozen matrix has more rows and columns" in result.stderr
