"""`moetool upcycle --method branch-train-mix`: several fine-tuned models into one MoE model."""

import json
import re
import shlex
import shutil
import signal
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import (
    change_config,
    config_of,
    contents,
    copy_of,
    ffn_inputs,
    load,
    load_whole,
    logits,
    relative_error,
    tensors_of,
    weight_bytes,
    weights,
)
from safetensors.torch import load_file, save_file
from sampling import sampled
from torch import Tensor
from transformers import AutoTokenizer

from moetool.calibration.windows import sample_windows
from moetool.checkpoint.reader import Checkpoint
from moetool.quiet import quiet

MIX = ("--method", "branch-train-mix")
LAYERS = 3
ROLES = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
PROMPTS = [
    ["Tell me a story about a river.", "Once upon a time"],
    ["1 + 2 * 3 = 7; 12 / 4 = 3", "99 - 98 = 1"],
    ["def f(x):\n    return x[::-1]", "for (;;) { i++; }", "import os"],
]


merges = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def models(dense: Any) -> list[Path]:
    """Three models of one shape."""
    return [dense("llama", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def given(models: list[Path]) -> tuple[object, ...]:
    """All of them as `--source`."""
    return tuple(part for path in models for part in ("--source", path))


@pytest.fixture(scope="module")
def mixed(upcycle: Any, models: list[Path], given: Any) -> Any:
    """What the defaults make of them."""
    return upcycle(models[0], *MIX, *given)


@pytest.fixture
def preset(tmp_path: Path) -> Callable[..., Path]:
    """`preset(**options)`: a preset for this command and method."""

    def write(**options: Any) -> Path:
        path = tmp_path / f"preset-{len(list(tmp_path.glob('preset-*')))}.yaml"
        path.write_text(yaml.safe_dump({"command": "upcycle", "method": "branch-train-mix", "options": options}))
        return path

    return write


@pytest.fixture(scope="module")
def adapter(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the first model, for some of its projections, trained to anything but nothing."""
    from peft import LoraConfig, get_peft_model

    path = tmp_path_factory.mktemp("adapter") / "adapter"
    with quiet(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers something that it deprecates
        torch.manual_seed(0)
        settings = LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False
        )
        get_peft_model(load(models[0]), settings).save_pretrained(path)
    assert not (path / "config.json").exists()
    return path


@merges
def test_an_adapter_in_the_place_of_a_model(
    run_cli: Any, adapter: Path, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is and what to do with it; the line to type does it."""
    for command in (("inspect", adapter), ("upcycle", adapter, tmp_path / "out"), ("moefy", adapter, tmp_path / "out")):
        result = run_cli(*command)
        assert result.code == 3
        assert f"{adapter} is an adapter of {models[0]}, not a model" in result.stderr
        assert "--method branch-train-mix" in result.stderr
    line = re.search(r"python -c ('.*?'),", result.stderr)
    assert line is not None
    (program,) = shlex.split(line[1])
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert Checkpoint.open(tmp_path / "MERGED").tensors.keys() == Checkpoint.open(models[0]).tensors.keys()
    broken = copy_of(adapter, tmp_path / "broken")
    (broken / "adapter_config.json").write_text("[")
    assert f"{broken} is an adapter of another model" in run_cli("inspect", broken).stderr


@merges
def test_an_adapter_beside_a_model_or_its_config(
    run_cli: Any, adapter: Path, models: list[Path], tmp_path: Path, tiny_text: Path
) -> None:
    """transformers would run the first with the adapter and other code reads it without. The second is no model, though
    some trainers write it a config."""
    both, alone = (copy_of(path, tmp_path / path.name) for path in (models[0], adapter))
    shutil.copy(models[0] / "config.json", alone)
    for file in adapter.glob("adapter*"):
        shutil.copy(file, both)
    for command in (("eval", both, "--data", tiny_text), ("upcycle", both, tmp_path / "out"), ("report", both)):
        result = run_cli(*command)
        assert result.code == 3, result.stderr
        assert "with an adapter beside it" in result.stderr
    assert f"is an adapter of {models[0]}, not a model" in run_cli("inspect", alone).stderr
    for name, source in (("with", adapter), ("config", alone)):
        result = run_cli("upcycle", models[0], tmp_path / name, *MIX, "--source", models[0], "--source", source)
        assert result.code == 0, result.stderr
    assert tensors_of(tmp_path / "with").keys() == tensors_of(tmp_path / "config").keys()
    assert same(tensors_of(tmp_path / "with"), tensors_of(tmp_path / "config"))


def expert(tensors: dict[str, Tensor], layer: int, index: int) -> dict[str, Tensor]:
    """The matrices of one expert of a Mixtral, by role."""
    prefix = f"model.layers.{layer}.block_sparse_moe.experts.{index}."
    return {role: tensors[f"{prefix}{name}.weight"] for role, name in ROLES}


def ffn(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Those of a Llama."""
    return {role: tensors[f"model.layers.{layer}.mlp.{role}_proj.weight"] for role, _ in ROLES}


def outside(path: Path) -> dict[str, Tensor]:
    """Everything that is neither an expert nor a router."""
    return {
        name: value for name, value in tensors_of(path).items() if not re.search(r"\.(mlp|block_sparse_moe)\.", name)
    }


def same(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def routers(path: Path) -> list[Tensor]:
    tensors = tensors_of(path)
    return [tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in range(LAYERS)]


# -- weights


def test_experts_are_the_sources_networks(mixed: Any, models: list[Path]) -> None:
    made = tensors_of(mixed.path)
    for index, path in enumerate(models):
        source = tensors_of(path)
        for layer in range(LAYERS):
            assert same(expert(made, layer, index), ffn(source, layer))
    config = config_of(mixed.path)
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 3, 2)
    load_whole(mixed.path)


def test_the_rest_is_averaged(mixed: Any, models: list[Path]) -> None:
    found, sources = outside(mixed.path), [outside(path) for path in models]
    assert found.keys() == sources[0].keys()
    assert "lm_head.weight" in found
    for name, tensor in found.items():
        mean = torch.stack([source[name] for source in sources]).double().mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=2e-7)


def test_bf16_is_averaged_in_more(dense: Any, upcycle: Any) -> None:
    paths = [dense("llama", seed, torch.bfloat16) for seed in range(3)]
    found = outside(upcycle(paths[0], *MIX, *(part for path in paths for part in ("--source", path))).path)
    sources = [outside(path) for path in paths]
    for name, tensor in found.items():
        expected = torch.stack([source[name].float() for source in sources]).mean(0).bfloat16()
        assert tensor.dtype == torch.bfloat16
        assert tensor.equal(expected)


@pytest.mark.parametrize("which", ["input", "checkpoint"])
def test_the_rest_from_elsewhere(upcycle: Any, models: list[Path], given: Any, which: str) -> None:
    rest, expected = ("input", models[1]) if which == "input" else (models[2], models[2])
    made = upcycle(models[1], *MIX, *given, "--rest", rest)
    assert same(outside(made.path), outside(expected))
    assert same(expert(tensors_of(made.path), 1, 0), ffn(tensors_of(models[0]), 1))


def test_layers_that_stay_dense_are_averaged(upcycle: Any, models: list[Path], given: Any) -> None:
    made = tensors_of(upcycle(models[0], *MIX, *given, "--layers", "0,2").path)
    sources = [tensors_of(path) for path in models]
    for role, tensor in ffn(made, 1).items():
        mean = torch.stack([ffn(source, 1)[role] for source in sources]).double().mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=2e-7)
    assert made["model.layers.2.mlp.experts.1.down_proj.weight"].equal(ffn(sources[1], 2)["down"])


def test_more_experts_than_sources(upcycle: Any, models: list[Path], given: Any) -> None:
    """They begin again, with other routers."""
    made = upcycle(models[0], *MIX, *given, "--experts", 5)
    tensors = tensors_of(made.path)
    for layer, rows in enumerate(routers(made.path)):
        for index in range(5):
            assert same(expert(tensors, layer, index), ffn(tensors_of(models[index % 3]), layer))
        assert len(rows.unique(dim=0)) == 5


@pytest.mark.parametrize("target", ["mixtral", "granitemoe", "qwen2_moe", "moetool"])
def test_equal_sources_change_nothing(upcycle: Any, models: list[Path], tokens: Tensor, target: str) -> None:
    """Then the average is the model itself, and it does not matter who answers."""
    made = upcycle(models[0], *MIX, *("--source", models[0]) * 3, "--target", target)
    assert made.told["proof"]["relative_logit_error"] < 1e-5
    assert made.told["proof"]["preserves"] is False
    model = load_whole(made.path)
    with torch.inference_mode():
        found = model(input_ids=tokens, use_cache=False).logits
    assert relative_error(found, logits(models[0], tokens)) < 1e-5


def test_it_computes_what_its_parts_say(mixed: Any, models: list[Path], tokens: Tensor) -> None:
    """A dense model of the averaged rest, whose FFNs are replaced by the routed sum of the sources'."""
    rows, model = routers(mixed.path), load(models[0])
    model.load_state_dict(outside(mixed.path), strict=False)
    sources = [load(path).model.layers for path in models]

    def routed(layer: int) -> Callable[..., Tensor]:
        def hook(_: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            weight, chosen = (inputs[0] @ rows[layer].T).topk(2)
            share = torch.zeros(*output.shape[:2], 3).scatter(-1, chosen, weight.softmax(-1))
            answers = torch.stack([source[layer].mlp(inputs[0]) for source in sources], -1)
            return (answers * share[..., None, :]).sum(-1)

        return hook

    for layer, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(routed(layer))
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
    assert relative_error(logits(mixed.path, tokens), expected) < 1e-5


def test_the_same_from_the_same_seed(run_cli: Any, mixed: Any, models: list[Path], given: Any, tmp_path: Path) -> None:
    assert run_cli("upcycle", models[0], tmp_path / "out", *MIX, *given).code == 0
    assert contents(tmp_path / "out") == contents(mixed.path)
    assert run_cli("upcycle", models[0], tmp_path / "other", *MIX, *given, "--seed", 1).code == 0
    one, other = tensors_of(mixed.path), tensors_of(tmp_path / "other")
    assert {name for name in one if not one[name].equal(other[name])} == {name for name in one if "moe.gate" in name}


@pytest.mark.parametrize("index", range(3))
def test_every_source_can_be_had_back(run_cli: Any, mixed: Any, models: list[Path], tmp_path: Path, index: int) -> None:
    """Its feed-forward networks, in the averaged rest."""
    result = run_cli("export", mixed.path, tmp_path / "out", "--format", "dense", "--expert", index)
    assert result.code == 0, result.stderr
    assert same(outside(tmp_path / "out"), outside(mixed.path))
    for layer in range(LAYERS):
        assert same(ffn(tensors_of(tmp_path / "out"), layer), ffn(tensors_of(models[index]), layer))


def test_other_families(dense: Any, upcycle: Any) -> None:
    for family, name, own in (
        ("phi3", "model.layers.2.mlp.down_proj.weight", "model.layers.2.block_sparse_moe.experts.1.w2.weight"),
        ("gpt_neox", "gpt_neox.layers.2.mlp.dense_4h_to_h.bias", "gpt_neox.layers.2.mlp.experts.down_proj_bias"),
    ):
        paths = [dense(family, seed) for seed in (0, 1)]
        made = upcycle(paths[0], *MIX, "--source", paths[0], "--source", paths[1])
        load_whole(made.path)
        found = tensors_of(made.path)[own]
        assert (found[1] if family == "gpt_neox" else found).equal(tensors_of(paths[1])[name])


# -- adapters


@merges
def test_an_adapter_is_merged(upcycle: Any, models: list[Path], adapter: Path) -> None:
    made = upcycle(models[0], *MIX, "--source", models[0], "--source", adapter)
    tensors, base, lora = tensors_of(made.path), tensors_of(models[0]), load_file(adapter / "adapter_model.safetensors")

    def added(layer: int, projection: str) -> Tensor:
        own = f"base_model.model.model.layers.{layer}.{projection}.lora_"
        return 2.0 * lora[f"{own}B.weight"] @ lora[f"{own}A.weight"]

    for layer in range(LAYERS):
        before, found = ffn(base, layer), expert(tensors, layer, 1)
        assert same(expert(tensors, layer, 0), before)
        assert found["up"].equal(before["up"])
        for role in ("gate", "down"):
            change = added(layer, f"mlp.{role}_proj")
            assert change.abs().max() > 0.1
            torch.testing.assert_close(found[role], before[role] + change, rtol=0, atol=1e-6)
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        expected = base[name] + added(layer, "self_attn.q_proj") / 2
        torch.testing.assert_close(tensors[name], expected, rtol=0, atol=1e-6)
        name = name.replace("q_proj", "o_proj")
        assert tensors[name].equal(base[name])
    assert not [name for name in contents(made.path) if "adapter" in name or "merged" in name]


@merges
def test_an_adapter_makes_work(run_cli: Any, models: list[Path], adapter: Path, tmp_path: Path) -> None:
    arguments = ("upcycle", models[0], tmp_path / "out", *MIX, "--source", models[0], "--source", adapter)
    plan = run_cli(*arguments, "--dry-run", "--json").json
    assert plan["scratch_bytes"] == weight_bytes(models[0])
    assert not (tmp_path / "out").exists()
    assert run_cli(*arguments, "--disk", plan["output_bytes"]).code == 4
    assert run_cli(*arguments, "--json").json["bytes_after"] == plan["output_bytes"]


@merges
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"peft_type": "IA3"}, ["IA3", "only LoRA"]),
        ("{", ["adapter_config.json", "not valid JSON"]),
        ({"target_modules": ["q_proj", "gate_proj"]}, ["cannot be merged", "no place for", "down_proj"]),
        ({"target_modules": ["q_proj", "gate_proj", "down_proj", "up_proj"]}, ["cannot be merged", "lacks", "up_proj"]),
    ],
)
def test_a_bad_adapter(
    run_cli: Any, models: list[Path], adapter: Path, tmp_path: Path, damage: Any, words: list[str]
) -> None:
    path = copy_of(adapter, tmp_path / "adapter")
    file = path / "adapter_config.json"
    file.write_text(damage if isinstance(damage, str) else json.dumps({**json.loads(file.read_text()), **damage}))
    result = run_cli("upcycle", models[0], tmp_path / "out", *MIX, "--source", models[0], "--source", path)
    assert result.code == 3
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "out").exists()


@merges
def test_an_adapter_of_another_model(run_cli: Any, dense: Any, adapter: Path, tmp_path: Path) -> None:
    source = dense("llama", intermediate_size=64)
    result = run_cli("upcycle", source, tmp_path / "out", *MIX, "--source", source, "--source", adapter)
    assert result.code == 3
    assert "cannot be merged into" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out/*.safetensors"))
    assert not (tmp_path / "out" / "config.json").exists()


# -- routers


@pytest.fixture(scope="module")
def inputs_of(models: list[Path]) -> Callable[[list[list[Tensor]]], list[list[Tensor]]]:
    """What the FFNs of the first model are given: rows `[tokens, hidden]` by layer, by group of prompts."""

    def run(groups: list[list[Tensor]]) -> list[list[Tensor]]:
        model, found = load(models[0]), []
        for group in groups:
            with torch.inference_mode(), ffn_inputs(model, "model.layers.{layer}.mlp") as seen:
                for prompt in group:
                    model(input_ids=prompt[None], use_cache=False)
            found.append([torch.cat(seen[layer]) for layer in range(LAYERS)])
        return [list(layer) for layer in zip(*found, strict=True)]

    return run


def check_routers(rows: list[Tensor], inputs: list[list[Tensor]]) -> None:
    """They send every text to its own expert, leave the common part out, and are neither flat nor one-hot."""
    for layer, router in enumerate(rows):
        every = torch.cat(inputs[layer]).double()
        mean, means = every.mean(0), torch.stack([group.double().mean(0) for group in inputs[layer]])
        answers = means @ router.double().T  # [text, expert]
        assert answers.argmax(1).tolist() == list(range(len(means)))
        assert (router.double() @ mean).abs().max() < 1e-4 * router.norm() * mean.norm()
        spread = (every @ router.double().T).var(0, correction=0).mean().sqrt().item()
        assert spread == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("names", [("model", "prompts"), ("source_model", "positive_prompts")], ids=["own", "mergekit"])
@pytest.mark.parametrize("key", ["source", "sources"])
def test_routers_from_prompts(
    upcycle: Any, models: list[Path], preset: Any, inputs_of: Any, names: tuple[str, str], key: str
) -> None:
    sources = [{names[0]: str(path), names[1]: PROMPTS[index]} for index, path in enumerate(models)]
    made = upcycle(models[0], "--preset", preset(gate_mode="prompts", **{key: sources}))
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    groups = [[torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in group] for group in PROMPTS]
    check_routers(routers(made.path), inputs_of(groups))
    tensors = tensors_of(made.path)
    for index, path in enumerate(models):
        assert same(expert(tensors, 1, index), ffn(tensors_of(path), 1))


def test_routers_from_data(
    upcycle: Any, models: list[Path], preset: Any, inputs_of: Any, tiny_text: Path, tmp_path: Path
) -> None:
    numbers, code = tmp_path / "numbers.txt", tmp_path / "code.txt"
    numbers.write_text("\n".join(f"{n} + {n * 7} = {n * 8};" for n in range(400)))
    code.write_text("".join(f"def f{n}(x, y):\n    return [x, {{y: '{n}'}}]\n" for n in range(200)))
    files = [tiny_text, numbers, code]
    sources = [{"model": str(path), "data": str(file)} for path, file in zip(models, files, strict=True)]
    options = {"samples": 6, "sequence_length": 48, "seed": 3}
    made = upcycle(models[0], "--preset", preset(gate_mode="data", source=sources, **options))
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    groups = [list(sample_windows(str(file), tokenizer, **options)) for file in files]
    check_routers(routers(made.path), inputs_of(groups))


def test_prompts_that_it_should_not_get(upcycle: Any, models: list[Path], preset: Any, inputs_of: Any) -> None:
    unwanted = ["Dear Sir or Madam,", "Yours sincerely"]
    sources = [{"model": str(path), "prompts": PROMPTS[index]} for index, path in enumerate(models)]
    plain = upcycle(models[0], "--preset", preset(gate_mode="prompts", source=sources))
    sources[1]["negative_prompts"] = unwanted
    warned = upcycle(models[0], "--preset", preset(gate_mode="prompts", source=sources))
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    groups = [[torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in [*PROMPTS[1], *unwanted]]]
    groups = [groups[0][:2], groups[0][2:]]
    for layer, (wanted, other) in enumerate(inputs_of(groups)):

        def preference(path: Path, layer: int = layer, wanted: Tensor = wanted, other: Tensor = other) -> float:
            row = routers(path)[layer][1]
            return ((wanted.mean(0) - other.mean(0)) @ row / row.norm()).item()

        assert preference(warned.path) > preference(plain.path)


def test_copies_of_a_source_share_its_prompts(upcycle: Any, models: list[Path], preset: Any) -> None:
    sources = [{"model": str(path), "prompts": PROMPTS[index]} for index, path in enumerate(models)]
    once = upcycle(models[0], "--preset", preset(gate_mode="prompts", source=sources))
    twice = upcycle(models[0], "--preset", preset(gate_mode="prompts", source=sources, experts=6))
    for few, many in zip(routers(once.path), routers(twice.path), strict=True):
        assert not many[:3].equal(many[3:])
        for half in (many[:3], many[3:]):
            alike = torch.nn.functional.cosine_similarity(half[:, None], few[None], dim=-1)
            assert alike.argmax(1).tolist() == [0, 1, 2]
            assert alike.diagonal().min() > 0.9


def test_centred_random_routers(upcycle: Any, models: list[Path], given: Any, calibration: Any) -> None:
    made = upcycle(models[0], *MIX, *given, "--center-router", *calibration)
    windows = sample_windows(
        str(calibration[1]), AutoTokenizer.from_pretrained(models[0]), samples=16, sequence_length=32, seed=0
    )
    model = load(models[0])
    with torch.inference_mode(), ffn_inputs(model, "model.layers.{layer}.mlp") as seen:
        model(input_ids=windows, use_cache=False)
    for layer, rows in enumerate(routers(made.path)):
        mean = torch.cat(seen[layer]).mean(0)
        assert (rows @ mean).abs().max() < 1e-5 * rows.norm() * mean.norm()


# -- killed jobs


@merges
@pytest.mark.parametrize(
    ("kind", "tenths"),
    sampled(product(("prompts", "adapter"), (1, 3, 6)), [("prompts", 6)]),
)
def test_a_killed_job_resumes_to_the_same_bytes(
    crash: Any, models: list[Path], preset: Any, adapter: Path, tmp_path: Path, kind: str, tenths: int
) -> None:
    sources: list[Any] = [{"model": str(path), "prompts": PROMPTS[index]} for index, path in enumerate(models)]
    options: dict[str, Any] = {"source": sources, "gate_mode": "prompts", "shard_size": "80kB"}
    if kind == "adapter":
        options |= {"source": [str(models[1]), str(adapter)], "gate_mode": "random"}
    arguments = ("upcycle", models[0], "--preset", preset(**options))
    output, at = tmp_path / "out", crash.whole(tmp_path / "quiet", arguments) * tenths // 10
    assert crash(output, arguments, at=at)["code"] == -signal.SIGKILL
    assert not (output / "config.json").exists()
    last = crash(output, (*arguments, "--resume"))
    assert last["code"] == 0, (at, last["stderr"])
    assert contents(output) == contents(tmp_path / "quiet"), at


def test_another_source_is_not_the_same_job(crash: Any, models: list[Path], tmp_path: Path) -> None:
    """What was written of one set of sources is not finished with another, or in another order."""
    arguments = ("upcycle", models[0], *MIX, "--shard-size", "80kB", "--source", models[0], "--source")
    assert crash(tmp_path / "out", (*arguments, models[1]), at=12)["code"] == -signal.SIGKILL
    before = contents(tmp_path / "out")
    turned = (*arguments[:-2], models[1], "--source", models[0])
    for other in ((*arguments, models[2]), (*arguments, models[1], "--rest", models[1]), turned):
        told = crash(tmp_path / "out", (*other, "--resume"))
        assert told["code"] == 2, told["stderr"]
    assert contents(tmp_path / "out") == before
    assert crash(tmp_path / "out", (*arguments, models[1], "--resume"))["code"] == 0


# -- costs


def test_a_dry_run_knows_the_bytes(run_cli: Any, mixed: Any, models: list[Path], given: Any, tmp_path: Path) -> None:
    plan = run_cli("upcycle", models[0], tmp_path / "out", *MIX, *given, "--dry-run", "--json").json
    assert plan["output_bytes"] == weight_bytes(mixed.path)
    assert (plan["experts"], plan["target"], plan["scratch_bytes"]) == (3, "mixtral", 0)
    counts = {"total": "parameters", "active": "active_parameters", "added": "added_parameters"}
    assert {name: plan[key] for name, key in counts.items()} == mixed.told["parameters"]
    bare = []
    for index in range(3):
        bare.append(tmp_path / f"config-{index}")
        bare[-1].mkdir()
        (bare[-1] / "config.json").write_bytes((models[index] / "config.json").read_bytes())
    imagined = (part for path in bare for part in ("--source", path))
    told = run_cli("upcycle", bare[0], tmp_path / "out", *MIX, *imagined, "--dry-run", "--json").json
    assert told["output_bytes"] == plan["output_bytes"]
    assert not (tmp_path / "out").exists()


def test_what_is_printed(run_cli: Any, models: list[Path], given: Any, tmp_path: Path) -> None:
    result = run_cli("upcycle", models[0], tmp_path / "out", *MIX, *given)
    assert re.search(r"^logits +differ from .*\(the method changes the model\)$", result.stdout, re.M), result.stdout


# -- what cannot be used


@pytest.fixture
def refused(run_cli: Any, tmp_path: Path) -> Callable[..., str]:
    """`refused(code, source, *options)`: it ends with that code, and there is no output; what it says."""

    def run(code: int, source: Path, *options: object) -> str:
        result = run_cli("upcycle", source, tmp_path / "out", *options)
        assert result.code == code, (result.code, result.stderr)
        assert "Traceback" not in result.stderr
        assert result.stdout == ""
        assert not (tmp_path / "out").exists()
        last = result.stderr.splitlines()[-1]
        assert last.lower().startswith("error: ")
        return last

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--experts 2", ["--experts 2", "3 sources"]),
        ("--top-k 4", ["--top-k 4", "only 3 experts"]),
        ("--gate-mode prompts", ["--gate-mode prompts", "llama-0 has no prompts", "--preset FILE"]),
        ("--gate-mode data", ["--gate-mode data", "llama-0 has no data"]),
        ("--gate-mode guess", ["guess", "prompts"]),
        ("--layers 7", ["--layers 7", "layers 0 to 2"]),
    ],
)
def test_a_bad_option(refused: Any, models: list[Path], given: Any, options: str, words: list[str]) -> None:
    message = refused(2, models[0], *MIX, *given, *options.split())
    assert all(word in message for word in words), message


def test_too_few_sources(refused: Any, models: list[Path]) -> None:
    for few in ((), ("--source", models[1])):
        assert "at least two models: --source A --source B" in refused(2, models[0], *MIX, *few)
    assert "--source" in refused(2, models[0], "--source", models[1]), "of another method"


@pytest.mark.parametrize("place", ["source", "rest"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 40}, ["different shapes", "[288, 40]", "[288, 32]", "lm_head.weight"]),
        ({"vocab_size": 300}, ["different vocabularies", "[300, 32]", "[288, 32]", "lm_head.weight"]),
        ({"intermediate_size": 64}, ["different shapes", "layers.0.mlp.down_proj.weight", "[32, 64]", "[32, 48]"]),
        ({"num_key_value_heads": 4}, ["different shapes", "layers.0.self_attn.k_proj.weight"]),
        ({"num_hidden_layers": 2}, ["has no tensor model.layers.2.", "cannot be mixed"]),
        ({"num_hidden_layers": 4}, ["has a tensor model.layers.3.", "cannot be mixed"]),
        ({"rms_norm_eps": 1e-6}, ["rms_norm_eps 1e-06", "0.0001"]),
        ({"rope_theta": 10000.0}, ["rope_parameters"]),
    ],
)
def test_models_of_another_shape(
    refused: Any, dense: Any, models: list[Path], changes: dict[str, Any], words: list[str], place: str
) -> None:
    other = dense("llama", 1, **changes)
    options = ("--source", other) if place == "source" else ("--source", models[1], "--rest", other)
    message = refused(3, models[0], *MIX, "--source", models[0], *options)
    assert all(word in message for word in [*words, str(other)]), message


def test_models_that_are_not_there(refused: Any, models: list[Path], tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    for options in (("--source", missing), ("--source", models[1], "--rest", missing)):
        message = refused(3, models[0], *MIX, "--source", models[0], *options)
        assert str(missing) in message


def test_a_source_that_cannot_be_used(
    refused: Any, models: list[Path], tiny_mixtral: Path, dense: Any, tmp_path: Path
) -> None:
    for path, word in (
        (tiny_mixtral, "cannot be mixed"),
        (dense("gpt_neox"), "cannot be mixed"),
        (change_config(copy_of(models[1], tmp_path / "q"), quantization_config={"quant_method": "awq"}), "awq"),
    ):
        assert word in refused(3, models[0], *MIX, "--source", models[0], "--source", path)


def test_presets_with_mistakes(refused: Any, models: list[Path], preset: Any) -> None:
    first, second = ({"model": str(path), "prompts": ["text"]} for path in models[:2])
    for wrong, word in (({**second, "promts": ["text"]}, "promts"), (str(models[1]), "has no prompts")):
        assert word in refused(2, models[0], "--preset", preset(source=[first, wrong], gate_mode="prompts"))
    message = refused(2, models[0], "--preset", preset(source=[first, {"prompts": ["text"]}]))
    assert "source[1].model" in message
    message = refused(2, models[0], "--preset", preset(experts=[first, second]))
    assert "sources" in message


@pytest.mark.parametrize("place", ["source", "rest"])
def test_a_source_is_not_overwritten(run_cli: Any, models: list[Path], mixed: Any, tmp_path: Path, place: str) -> None:
    """Nor is what moetool itself has written, and could be told to overwrite."""
    mine = copy_of(models[1], tmp_path / "mine")
    (mine / "moetool.json").write_bytes((mixed.path / "moetool.json").read_bytes())
    before = contents(mine)
    options = ("--source", mine) if place == "source" else ("--source", models[2], "--rest", mine)
    result = run_cli("upcycle", models[0], mine, *MIX, "--source", models[0], *options, "--overwrite")
    assert result.code == 2
    assert "which this job reads" in result.stderr
    assert contents(mine) == before


@pytest.mark.parametrize(("mode", "word"), [("prompts", "A prompt is empty"), ("data", "nope.txt")])
def test_text_that_cannot_be_used(
    run_cli: Any, models: list[Path], preset: Any, tmp_path: Path, mode: str, word: str
) -> None:
    sources = [{"model": str(path), "prompts": [""], "data": "./nope.txt"} for path in models]
    path = preset(source=sources, gate_mode=mode)
    result = run_cli("upcycle", models[0], tmp_path / "out", "--preset", path)
    assert result.code == 3
    assert word in result.stderr
    assert not {name for name in contents(tmp_path / "out") if "/" not in name}
    # Nothing is in the way of the command once it is right.
    right = preset(source=[str(model) for model in models])
    assert run_cli("upcycle", models[0], tmp_path / "out", "--preset", right).code == 0
    assert weights(tmp_path / "out")


def test_what_a_model_may_leave_out(upcycle: Any, dense: Any, tmp_path: Path) -> None:
    """Old models store rotary frequencies, and some a head that is tied: others can be mixed with them."""
    first, second = (dense("llama", seed, tie_word_embeddings=True) for seed in (0, 1))
    rich = copy_of(first, tmp_path / "rich")
    tensors = load_file(first / "model.safetensors")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**tensors, **extra}, rich / "model.safetensors", {"format": "pt"})
    plain = upcycle(first, *MIX, "--source", first, "--source", second)
    for input_, sources in ((rich, (rich, second)), (first, (rich, second))):
        given = (part for path in sources for part in ("--source", path))
        made = tensors_of(upcycle(input_, *MIX, *given).path)
        assert all(made[name].equal(tensor) for name, tensor in tensors_of(plain.path).items())


def test_sources_of_different_precision(upcycle: Any, dense: Any) -> None:
    """A tensor of many megabytes is averaged in blocks of as many elements, not bytes."""
    wide = {"vocab_size": 140_000}
    first, second = dense("llama", 0, torch.bfloat16, **wide), dense("llama", 1, **wide)
    made = tensors_of(upcycle(first, *MIX, "--source", first, "--source", second, "--no-proof").path)
    both = [tensors_of(path)["model.embed_tokens.weight"].float() for path in (first, second)]
    assert made["model.embed_tokens.weight"].equal(torch.stack(both).mean(0).bfloat16())


def test_sources_are_averaged_to_the_precision_of_the_input(upcycle: Any, dense: Any) -> None:
    """Not by way of the first source's: bf16 has 8 bits of a number, and fp16 ends at 65,504."""
    paths = [dense("llama", 1, torch.bfloat16), dense("llama", 2, torch.float16), dense("llama", 0)]
    given = [part for path in paths for part in ("--source", path)]
    made = tensors_of(upcycle(paths[2], *MIX, *given, "--layers", "0,2").path)
    sources = [tensors_of(path) for path in paths]
    for name in [name for name in made.keys() & sources[0].keys() if ".0.mlp." not in name and ".2.mlp." not in name]:
        mean = torch.stack([source[name].double() for source in sources]).mean(0)
        assert made[name].dtype == torch.float32
        torch.testing.assert_close(made[name].double(), mean, rtol=0, atol=2e-7)
