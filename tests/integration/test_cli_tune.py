"""`moetool tune`, run as a user runs it."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import ONE_THREAD, contents, copy_of, load, load_whole, logits, relative_error, tensors_of
from safetensors.torch import save_file
from sampling import sampled
from torch import Tensor
from words import overridden

SHORT = ("--sequence-length", 64, "--batch-size", 2, "--learning-rate", 1e-3, "--log-every", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    """Questions and answers."""
    words = tiny_text.read_text().split()
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    pairs = [{"prompt": " ".join(words[i : i + 5]), "completion": " ".join(words[i + 5 : i + 9])} for i in range(60)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture(scope="module")
def moe(dense: Any, upcycle: Any) -> Path:
    return upcycle(dense("llama"), "--experts", 4).path


@pytest.fixture
def tuned(run_cli: Any, tmp_path: Path) -> Any:
    def run(source: Path, *options: object) -> tuple[Path, Any]:
        output = tmp_path / f"tuned-{len(list(tmp_path.glob('tuned-*')))}"
        result = run_cli("tune", source, output, *SHORT, *options, "--json")
        assert result.code == 0, result.stderr
        return output, result.json

    return run


def test_it_learns(tuned: Any, moe: Path, tiny_text: Path, tokens: Tensor) -> None:
    output, told = tuned(moe, "--data", tiny_text, "--eval-data", tiny_text, "--steps", 12, "--learning-rate", 1e-2)
    before = _loss(moe, tokens)
    assert told["steps"] == 12
    assert told["eval_loss"] < before - 0.2
    assert _loss(output, tokens) < before - 0.2
    assert told["trained_parameters"] == sum(tensor.numel() for tensor in tensors_of(moe).values())
    assert (output / "tokenizer.json").read_bytes() == (moe / "tokenizer.json").read_bytes()
    assert (output / "config.json").read_text() == (moe / "config.json").read_text()
    assert tensors_of(output).keys() == tensors_of(moe).keys()


@pytest.mark.parametrize("more", [(), ("--train", "lora"), ("--train", "lora", "--bf16")], ids=" ".join)
def test_the_loss_at_the_end_is_that_of_the_model_as_it_is_saved(
    tuned: Any, tiny_mixtral_bf16: Path, data: Path, more: tuple[str, ...]
) -> None:
    """In bf16, whose numbers are some way from those that were learnt."""
    texts = ("--data", data, "--eval-data", data, "--eval-every", 1)
    output, told = tuned(tiny_mixtral_bf16, *texts, "--steps", 2, "--learning-rate", 1e-2, *more)
    _, again = tuned(output, *texts, "--steps", 1, "--learning-rate", 1e-12, *more)  # which moves nothing
    assert told["eval_loss"] == again["eval_loss"]
    assert told["curve"][-1]["eval_loss"] == pytest.approx(told["eval_loss"], abs=1e-6)


def test_a_last_step_that_goes_astray_is_told_as_such(run_cli: Any, moe: Path, data: Path, tmp_path: Path) -> None:
    """No loss is taken after it. What the job found then was a result that transformers computes otherwise."""
    astray = ("--steps", 1, "--warmup", 0, "--batch-size", 2, "--sequence-length", 64, "--learning-rate", 1e30)
    result = run_cli("tune", moe, tmp_path / "out", "--data", data, *astray)
    assert result.code == 5
    assert "after the last step: --learning-rate is far too large" in result.stderr


def test_it_learns_the_bundled_text(tuned: Any, run_cli: Any, moe: Path, tmp_path: Path) -> None:
    """As docs/jobs.md has it of --data; it was looked for on the hub."""
    _, told = tuned(moe, "--data", "bundled:dialogue", "--steps", 1)
    assert told["examples"] > 1
    without_steps = ("tune", moe, tmp_path / "out", "--data", "bundled:dialogue", "--dry-run", "--json")
    assert run_cli(*without_steps).json["phases"]


def test_layers_that_run_again_learn_the_same(tuned: Any, moe: Path, data: Path) -> None:
    once, _ = tuned(moe, "--data", data, "--steps", 2)
    again, _ = tuned(moe, "--data", data, "--steps", 2, "--gradient-checkpointing")
    ours, theirs = tensors_of(once), tensors_of(again)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_it_is_evaluated_once_a_step(run_cli: Any, moe: Path, data: Path, tmp_path: Path) -> None:
    """Also where a step ends an epoch, of which there are two here, and the last is that of the training."""
    options = (*SHORT, "--data", data, "--eval-data", data, "--no-packing", "--batch-size", 30, "--epochs", 2)
    result = run_cli("tune", moe, tmp_path / "tuned", *options, "--eval-every", 1)
    assert result.code == 0, result.stderr
    evaluated = [line.partition(":")[0] for line in result.stderr.splitlines() if "held-out loss" in line]
    assert evaluated == ["step 0", "step 1", "step 2", "step 3", "step 4"]


def test_it_tells_what_was_learnt(run_cli: Any, moe: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Fewer steps than lie between two lines of log, the first and the last of which are there."""
    options = ("--data", tiny_text, "--eval-data", tiny_text, "--sequence-length", 64, "--steps", 4)
    options = (*options, "--learning-rate", 1e-2)
    plan = run_cli("tune", moe, tmp_path / "tuned", *options, "--dry-run", "--json").json
    assert (plan["steps"], plan["trained_parameters"]) == (4, plan["parameters"])
    assert [phase["name"] for phase in plan["phases"]] == ["Train", "Evaluate", "Write"]
    told = run_cli("tune", moe, tmp_path / "told", *options, "--json").json
    assert told["curve"][0] == {"step": 0, "eval_loss": told["eval_loss_before"]}
    assert told["eval_loss_before"] > told["eval_loss"] + 0.1
    assert [point["step"] for point in told["curve"] if "loss" in point] == [1, 4]
    shown = run_cli("tune", moe, tmp_path / "tuned", *options)
    assert f"{told['eval_loss_before']:.4f} → {told['eval_loss']:.4f} nats per token" in shown.stdout
    assert f"{plan['parameters']:,} parameters in 4 steps" in shown.stdout


@pytest.mark.parametrize("option", [("--overlap", 0.1), ("--sample-masks",), ("--multiplier-rate", 2)])
def test_options_of_masks_are_for_models_that_have_some(
    run_cli: Any, moe: Path, data: Path, tmp_path: Path, option: Any
) -> None:
    result = run_cli("tune", moe, tmp_path / "tuned", *SHORT, "--data", data, *option, "--dry-run")
    assert result.code == 2
    assert f"{option[0]} is for what upcycle --method simoe makes" in result.stderr


def test_layers_that_predict_further_tokens_stay_as_they_are(
    tuned: Any, save_model: Any, data: Path, tmp_path: Path
) -> None:
    source = save_model(families.build("deepseek_v3"), tmp_path / "model")
    families.add_prediction_layer(source)
    output, _ = tuned(source, "--data", data, "--steps", 1)
    before, after = tensors_of(source), tensors_of(output)
    assert before.keys() == after.keys()
    further = [name for name in before if name.startswith("model.layers.3.")]
    assert further
    assert all(before[name].equal(after[name]) for name in further)
    assert not all(before[name].equal(after[name]) for name in before.keys() - set(further))


@pytest.mark.parametrize("is_moe", [False, True])
def test_a_bare_decoder_is_tuned_as_in_the_whole_model(
    tuned: Any, dense: Any, moe: Path, data: Path, tmp_path: Path, is_moe: bool
) -> None:
    """As GPT-2 lies on the hub, with a buffer that is no weight."""
    source = moe if is_moe else dense("llama")
    bare = copy_of(source, tmp_path / "bare")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_of(source).items()}
    save_file(tensors | {"layers.0.rotary_emb.inv_freq": torch.ones(4)}, bare / "model.safetensors", {"format": "pt"})
    whole, made = (tensors_of(tuned(path, "--data", data, "--steps", 2)[0]) for path in (source, bare))
    assert made.keys() - whole.keys() == {"model.layers.0.rotary_emb.inv_freq"}
    assert all(torch.equal(made[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("warmup", [0.03, 0.99])
def test_a_single_step_learns(tuned: Any, moe: Path, data: Path, warmup: float) -> None:
    """The rate rises from 0, which a step that is the only one would be taken with."""
    output, _ = tuned(moe, "--data", data, "--steps", 1, "--warmup", warmup)
    before, after = tensors_of(moe), tensors_of(output)
    assert not any(before[name].equal(after[name]) for name in before if "self_attn" in name)


def _loss(path: Path, tokens: Tensor) -> float:
    with torch.inference_mode():
        return load(path)(input_ids=tokens, labels=tokens, use_cache=False).loss.item()


def test_the_same_seed_gives_the_same_bytes(tuned: Any, moe: Path, data: Path) -> None:
    first, second, other = (tuned(moe, "--data", data, "--steps", 3, "--seed", seed)[0] for seed in (1, 1, 2))
    assert contents(first) == contents(second)
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_what_cannot_be_trained(run_cli: Any, moe: Path, data: Path, tmp_path: Path) -> None:
    """Codes without scales, and a model that gives NaN before it has learnt anything."""
    name = "model.layers.0.self_attn.q_proj.weight"
    for value, code, said in (
        (torch.zeros(32, 32, dtype=torch.int8), 3, f"{name} is stored as int8"),
        (torch.full((32, 32), torch.nan), 5, "at step 0, before anything has changed: weights are damaged"),
    ):
        broken = shutil.copytree(moe, tmp_path / f"broken-{code}")
        save_file({**tensors_of(moe), name: value}, broken / "model.safetensors", {"format": "pt"})
        result = run_cli("tune", broken, tmp_path / "out", *SHORT, "--data", data, "--steps", 1)
        assert result.code == code, result.stderr
        assert said in result.stderr


@pytest.mark.parametrize(
    ("source", "tenths"),
    sampled(
        product(("mixtral", "own module", "differences"), (2, 3, 4)),
        [("mixtral", 2), ("own module", 4)],
    ),
)
def test_a_stopped_job_goes_on_to_the_same_bytes(
    crash: Any, dense: Any, upcycle: Any, data: Path, tmp_path: Path, source: str, tenths: int
) -> None:
    """Killed, or asked to stop, in the middle or after the last step: optimizer, data and experts are as they were."""
    options = {"mixtral": (), "own module": ("--target", "moetool"), "differences": ("--method", "ders-lowrank")}
    made = upcycle(dense("llama"), "--experts", 4, *options[source]).path
    arguments = ("tune", made, *SHORT, "--data", data, "--steps", 6, "--save-every", 2)
    changes = crash.whole(tmp_path / "quiet", arguments)
    output, sent = tmp_path / "out", {"sent": "SIGTERM"} if tenths == 2 else {}
    assert crash(output, arguments, at=changes * tenths // 10, **sent)["code"] in (75, -signal.SIGKILL)
    assert not (output / "config.json").exists()
    assert crash(output, (*arguments, "--seed", 9, "--resume"))["code"] == 2
    last = crash(output, (*arguments, "--resume"))
    assert last["code"] == 0, last["stderr"]
    assert contents(output) == contents(tmp_path / "quiet")


@pytest.mark.parametrize("method", ["ders-lowrank --rank 2", "ders-sparse --drop 0.9"])
def test_differences_and_their_base_are_trained(
    tuned: Any, dense: Any, upcycle: Any, run_cli: Any, data: Path, tokens: Tensor, tmp_path: Path, method: str
) -> None:
    source = upcycle(dense("llama"), "--experts", 4, "--method", *method.split()).path
    before = tensors_of(source)
    for frozen in ((), ("--freeze-shared",)):
        output, told = tuned(source, "--data", data, "--steps", 4, *frozen)
        after = tensors_of(output)
        changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        differences = {name for name in before if ".moetool." in name}
        bases = {name for name in before if name.endswith(("experts.0.w1.weight", "w3.weight", "experts.0.w2.weight"))}
        routers = {name for name in before if name.endswith("gate.weight")}
        assert changed - differences == (set() if frozen else bases) | routers
        assert len(changed & differences) > 0.5 * len(differences)
        assert told["trained_parameters"] == sum(before[name].numel() for name in changed | differences)
    # What was trained runs as it is, and with every expert written out.
    assert run_cli("export", output, tmp_path / "native").code == 0
    assert relative_error(logits(tmp_path / "native", tokens), logits(output, tokens)) < 1e-5


def test_the_balance_loss_evens_out_routing(tuned: Any, run_cli: Any, moe: Path, tiny_text: Path) -> None:
    shares = {}
    for weight in (0, 1):
        output = tuned(moe, "--data", tiny_text, "--steps", 25, "--train", "experts", "--balance", weight)[0]
        model, counts = load(output), []
        ids = torch.arange(256).view(4, 64)
        with torch.inference_mode():
            for layer in model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits:
                counts.append(torch.bincount(layer.topk(2, dim=-1).indices.flatten(), minlength=4).double())
        shares[weight] = torch.stack(counts).max().item() / counts[0].sum().item()
    assert shares[1] < shares[0]


def test_packing_changes_no_token(tuned: Any, moe: Path, data: Path) -> None:
    packed, apart = (tuned(moe, "--data", data, "--steps", 1, *options)[1] for options in ((), ("--no-packing",)))
    assert packed["answer_tokens"] == apart["answer_tokens"] > 0
    assert packed["examples"] == apart["examples"] == 60


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--data", "./nope.jsonl"), 3, ["nope.jsonl"]),
        (("--data", "QUESTIONS"), 3, ["none of text", "messages", "question"]),
        (("--data", "NULLS", "--dry-run"), 3, ["record 1 cannot be used", "text (null)"]),
        (("--data", "PAIRS", "--eval-data", "NULLS", "--dry-run"), 3, ["record 1 cannot be used"]),
        (("--data", "NOTHING", "--dry-run"), 3, ["nothing.jsonl has no text"]),
        (("--data", "TALKS", "--dry-run"), 3, ["record 1 cannot be used", "no chat template"]),
        (("--data", "PAIRS", "--freeze-shared"), 2, ["no deltas to a base"]),
        (("--data", "PAIRS", "--freeze-shared", "--train", "all"), 2, ["--freeze-shared", "--train all"]),
        (("--data", "PAIRS", "--sequence-length", 4096), 2, ["4096", "128"]),
        (("--data", "PAIRS", "--memory", "1MB"), 4, ["memory"]),
        (("--data", ""), 2, ["Cannot read the data ''"]),
        (("--data", "PAIRS", "--eval-data", " "), 2, ["Cannot read the data ' '"]),
        (("--data", "x" * 5000), 3, ["File name too long"]),
        (("--data", "PAIRS", "--report-to", "nonsense"), 2, ["there is no 'nonsense'", "tensorboard"]),
        (("--data", "PAIRS", "--report-to", "flyte"), 2, ["flyte is not installed"]),
        (("--data", "PAIRS", "--epochs", "inf"), 2, ["--epochs", "finite"]),
        (("--data", "PAIRS", "--bos", "always"), 2, ["no BOS token"]),
        (("--data", "PAIRS", "--compute-dtype", "float16"), 2, ["--compute-dtype float16", "--bf16"]),
        (("--data", "PAIRS", "--compute-dtype", "bfloat16"), 2, ["--compute-dtype bfloat16", "--bf16"]),
        ((), 2, ["--data is required"]),
    ],
)
def test_bad_input(
    run_cli: Any, moe: Path, data: Path, tmp_path: Path, options: tuple[object, ...], code: int, words: list[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "?", "answer": "!"}\n')
    nulls, nothing, talks = (tmp_path / f"{name}.jsonl" for name in ("nulls", "nothing", "talks"))
    nulls.write_text('{"text": null}\n{"text": "lo mi"}\n')
    nothing.write_text('{"text": null}\n')
    talks.write_text('{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n')
    named = {"PAIRS": data, "QUESTIONS": questions, "NULLS": nulls, "NOTHING": nothing, "TALKS": talks}
    result = run_cli("tune", moe, tmp_path / "out", *(named.get(option, option) for option in options))
    assert result.code == code, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_a_number(run_cli: Any, moe: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ("--sequence-length", 64, "--batch-size", 2, "--save-every", 1, "--steps", 20)
    result = run_cli("tune", moe, output, "--data", data, *options, "--learning-rate", 1e38, "--warmup", 0)
    assert result.code == 5, result.stderr
    assert " step" in result.stderr
    assert not (output / "config.json").exists()
    (kept,) = (output / ".moetool" / "trainer").glob("checkpoint-*")
    assert {file.stat().st_mode & 0o777 for file in kept.iterdir()} == {data.stat().st_mode & 0o777}


TORCHRUN = {"OMP_NUM_THREADS": "1"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "DS_ACCELERATOR": "cpu"}


@pytest.fixture
def two_processes(crash: Any, tmp_path: Path) -> Any:
    """`two_processes(environment, output, command, source, *options)`: what a command says in two of the driver's
    processes, or under torchrun."""

    def run(environment: Mapping[str, str], output: Path, *arguments: object) -> tuple[Any, str]:
        if environment in ({}, FSDP):
            done = crash(output, arguments, ranks=2, environment=environment)
            assert done["codes"] == [0, 0], done["stderr"]
            return json.loads(done["stdout"]), done["stderr"]
        command, source, *options = overridden(arguments)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "moetool")
        done = subprocess.run(
            [sys.executable, *launcher, command, source, str(output), *options],
            capture_output=True, text=True, check=False, cwd=tmp_path, env={**ONE_THREAD, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout[done.stdout.index("{\n") :]), done.stderr  # after what DeepSpeed says

    return run


@pytest.mark.parametrize(
    ("environment", "bits"),
    [
        pytest.param({}, None, id="replicated"),
        pytest.param({}, 2, id="replicated-codes", marks=pytest.mark.exhaustive),
        pytest.param(TORCHRUN, None, id="torchrun", marks=pytest.mark.exhaustive),
        pytest.param(FSDP, None, id="FSDP", marks=pytest.mark.exhaustive),
        pytest.param(FSDP, 2, id="FSDP-codes", marks=pytest.mark.exhaustive),
        pytest.param(
            ZERO, None, id="ZeRO", marks=pytest.mark.skipif(not find_spec("deepspeed"), reason="no deepspeed here")
        ),
    ],
)
def test_two_processes_learn_what_one_learns(
    run_cli: Any,
    two_processes: Any,
    moe: Path,
    tiny_text: Path,
    data: Path,
    tmp_path: Path,
    environment: dict[str, str],
    bits: int | None,
) -> None:
    """Half the batch each, with all weights or a part of them: the same steps, to rounding. So do scales of codes."""
    if bits is not None:
        source, moe = moe, tmp_path / "coded"
        coded = "--method", "quantize", "--bits", bits, "--include", "attention,embeddings"
        assert run_cli("compress", source, moe, *coded).code == 0
    options = ("--data", data, "--eval-data", tiny_text, "--sequence-length", 64, "--steps", 4, "--learning-rate", 1e-3)
    one = run_cli("tune", moe, tmp_path / "one", *options, "--batch-size", 4, "--balance", 0.1, "--json").json
    arguments = ("tune", moe, *options, "--batch-size", 2, "--balance", 0.1, "--json")
    two, said = two_processes(environment, tmp_path / "two", *arguments)
    assert "every process holds the whole model" not in said
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-4)
    assert two["steps"] == one["steps"] == 4
    assert two["trained_parameters"] == one["trained_parameters"]
    before, first, second = (tensors_of(path) for path in (moe, tmp_path / "one", tmp_path / "two"))
    frozen = {name for name in first if bits and not (name.endswith("gate.weight") or ".experts." in name)}
    frozen |= {name for name, tensor in first.items() if not tensor.is_floating_point() or tensor.numel() == 1}
    for name, tensor in first.items():
        if name in frozen:
            assert torch.equal(tensor, before[name]), name
            assert torch.equal(tensor, second[name]), name
            continue
        moved = (tensor - before[name]).norm()
        assert (tensor - second[name]).norm() < 0.02 * moved, name


@pytest.mark.exhaustive
def test_a_sharded_model_goes_on_where_it_was_killed(
    run_cli: Any, crash: Any, two_processes: Any, dense: Any, upcycle: Any, data: Path, tmp_path: Path
) -> None:
    """Between two steps, and after the last; so few tokens that experts are left without, in one process or in both."""
    source = upcycle(dense("llama"), "--experts", 16, "--method", "ders-lowrank", "--rank", 2).path
    options = ("--data", data, "--eval-data", data, "--sequence-length", 64, "--no-packing", "--freeze-shared")
    options = (*options, "--steps", 4, "--save-every", 2, "--learning-rate", 1e-3, "--json")
    one = run_cli("tune", source, tmp_path / "one", *options, "--batch-size", 2).json
    arguments = ("tune", source, *options, "--batch-size", 1)
    for at, more in (("checkpoint-4", ()), (".safetensors", ("--resume",))):
        killed = crash(tmp_path / "two", (*arguments, *more), at=at, ranks=2, environment=FSDP)
        assert killed["code"] == -signal.SIGKILL, killed["stderr"]
    assert {path.name for path in (tmp_path / "two" / ".moetool" / "trainer").iterdir()} == {"checkpoint-4"}
    two, _ = two_processes(FSDP, tmp_path / "two", *arguments, "--resume")
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-4)
    before, after = tensors_of(source), tensors_of(tmp_path / "two")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert all(".moetool." in name or name.endswith("gate.weight") for name in changed)
    load_whole(tmp_path / "two")


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        ({**FSDP, "FSDP_VERSION": "1"}, (), ["FSDP 1", "fsdp_version: 2"]),
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, (), ["ZeRO 3", "FSDP 2"]),
        (ZERO, ("--bf16",), ["--bf16", "ZeRO 2"]),
        (FSDP, ("--quantize-base", "nf4"), ["--quantize-base", "FSDP 2"]),
        (FSDP, ("--method", "simoe"), ["SIMoE", "FSDP 2"]),
    ],
)
def test_what_cannot_be_sharded(
    run_cli: Any,
    dense: Any,
    upcycle: Any,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    options: tuple[str, ...],
    words: list[str],
) -> None:
    is_method = "--method" in options
    source = upcycle(dense("llama"), "--experts", 4, *(options if is_method else ())).path
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run_cli("tune", source, tmp_path / "out", "--data", data, *(() if is_method else options))
    assert result.code == 2, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "out").exists()


def test_other_commands_run_in_one_process(run_cli: Any, dense: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run_cli("export", dense("llama"), tmp_path / "out", "--format", "gguf")
    assert result.code == 2
    assert "one process" in result.stderr
    assert not (tmp_path / "out").exists()


def test_other_data_under_the_same_name_is_not_the_same_run(crash: Any, moe: Path, data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_bytes(data.read_bytes())
    arguments = ("tune", moe, *SHORT, "--data", mine, "--steps", 6, "--save-every", 2)
    changes = crash.whole(tmp_path / "quiet", arguments)
    assert crash(tmp_path / "out", arguments, at=changes // 3)["code"] == -signal.SIGKILL
    mine.write_text(data.read_text().replace("a", "b"))
    told = crash(tmp_path / "out", (*arguments, "--resume"))
    assert told["code"] == 2, told["stderr"]
    assert f"{mine} has changed since this run began" in told["stderr"]
