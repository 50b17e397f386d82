"""`upcycle --method add-expert` and `compress --method drop-experts`: experts that come and go by number."""

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import yaml
from checkpoints import (
    change_config,
    change_tensors,
    config_of,
    contents,
    copy_of,
    load,
    load_whole,
    logits,
    relative_error,
    swap_tokens,
    tensors_of,
    weight_bytes,
)
from sampling import sampled
from torch import Tensor

from moetool.calibration.windows import drawn_windows, load_tokenizer
from moetool.job.execute import run_stage
from moetool.stages import stages

MIX = ("--method", "branch-train-mix", "--rest", "input", "--no-proof")
ADD = ("--method", "add-expert")
DROP = ("--method", "drop-experts")
TEXT = ("--samples", 16, "--sequence-length", 32)
SHARDS = ("--shard-size", "40KB")
# By dense family, how the model mixed of two is written: in a family of transformers, and by moetool's own module.
CASES = {
    "olmo2": ("olmo2", ()),
    "llama": ("llama", ()),
    "qwen3": ("qwen3", ()),
    "qwen2, some layers": ("qwen2", ("--layers", "0,2")),
    "granite": ("granite", ()),
    "gemma, in another family": ("gemma", ("--dtype", "float32")),
    "phi3": ("phi3", ()),
    "llama, beside its own FFN": ("llama", ("--shared", "half")),
    "gpt_neox": ("gpt_neox", ()),
    "llama, by moetool": ("llama", ("--target", "moetool", "--shared", "xft")),
}
STRUCTURES = ("olmo2", "qwen2, some layers", "phi3", "llama, beside its own FFN", "gpt_neox", "llama, by moetool")


def sources(paths: list[Path]) -> tuple[object, ...]:
    return tuple(part for path in paths for part in ("--source", path))


def provenance(path: Path) -> dict[str, Any]:
    return json.loads((path / "moetool.json").read_text())["provenance"]


@pytest.fixture(scope="module")
def models(dense: Any) -> list[Path]:
    """Three models of the family that becomes FlexOlmo."""
    return [dense("olmo2", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def mixed(upcycle: Any, models: list[Path]) -> Path:
    """A FlexOlmo of the first two."""
    return upcycle(models[0], *MIX, *sources(models[:2])).path


@pytest.fixture(scope="module")
def added(upcycle: Any, models: list[Path], mixed: Path) -> Any:
    """The same with the third."""
    return upcycle(mixed, *ADD, "--source", models[2])


# -- identities


@pytest.mark.parametrize("case", sampled(CASES, STRUCTURES))
def test_adding_is_mixing_all_at_once_and_dropping_undoes_it(
    run_cli: Any, dense: Any, upcycle: Any, tmp_path: Path, tokens: Tensor, case: str
) -> None:
    """Every tensor, byte for byte: routers are drawn row by row, and the rest is from the same model."""
    family, options = CASES[case]
    own = [dense(family, seed) for seed in range(3)]
    two, three = (upcycle(own[0], *MIX, *options, *sources(own[:count])).path for count in (2, 3))
    one_more = upcycle(two, *ADD, "--source", own[2]).path
    found, expected = tensors_of(one_more), tensors_of(three)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    assert config_of(one_more) == config_of(three)
    assert load_whole(one_more)(tokens).logits.equal(load_whole(three)(tokens).logits)
    again = run_cli("compress", one_more, tmp_path / "two", *DROP, "--drop", 2)
    assert again.code == 0, again.stderr
    found, expected = tensors_of(tmp_path / "two"), tensors_of(two)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    assert config_of(tmp_path / "two") == config_of(two)
    assert provenance(tmp_path / "two") == provenance(two)


def test_every_expert_can_be_had_back(run_cli: Any, added: Any, models: list[Path], tmp_path: Path) -> None:
    """The record of upcycling goes along: after dropping the first, the new number of the last is 1."""
    assert run_cli("compress", added.path, tmp_path / "two", *DROP, "--drop", 0).code == 0
    assert run_cli("export", tmp_path / "two", tmp_path / "one", "--format", "dense", "--expert", 1).code == 0
    found, expected = tensors_of(tmp_path / "one"), tensors_of(models[2])
    assert all(found[name].equal(expected[name]) for name in found if ".mlp." in name)
    assert any(".mlp." in name for name in found)


def test_what_is_dropped_first_is_renumbered(run_cli: Any, added: Any, tmp_path: Path, tokens: Tensor) -> None:
    """The others move up, and their routing stays: a token that never chose it gets what it got."""
    assert run_cli("compress", added.path, tmp_path / "out", *DROP, "--drop", "1").code == 0
    before, after = tensors_of(added.path), tensors_of(tmp_path / "out")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp."
        assert after[f"{prefix}gate.weight"].equal(before[f"{prefix}gate.weight"][[0, 2]])
        for role in ("gate", "up", "down"):
            moved = f"{role}_proj.weight"
            assert after[f"{prefix}experts.1.{moved}"].equal(before[f"{prefix}experts.2.{moved}"])
    assert logits(tmp_path / "out", tokens).isfinite().all()


def test_a_published_model_without_a_record(
    run_cli: Any, dense: Any, save_model: Any, tmp_path: Path, tokens: Tensor
) -> None:
    """A FlexOlmo that moetool did not make gets an expert, and can lose any."""
    published = save_model(families.build("flex_olmo"), tmp_path / "published")
    sizes = {"intermediate_size": 24, "num_key_value_heads": 2, "rope_theta": 500000.0, "rms_norm_eps": 1e-6}
    made = run_cli("upcycle", published, tmp_path / "more", *ADD, "--source", dense("olmo2", 5, **sizes), "--json")
    assert made.code == 0, made.stderr
    assert (made.json["experts"], made.json["added"]) == (7, 6)
    assert made.json["sources"][:6] == [None] * 6
    left = run_cli("compress", tmp_path / "more", tmp_path / "left", *DROP, "--drop", 0)
    assert "made of      5 × not recorded, " in left.stdout
    back = run_cli("compress", tmp_path / "more", tmp_path / "back", *DROP, "--drop", 6)
    assert back.code == 0, back.stderr
    assert logits(tmp_path / "back", tokens).equal(logits(published, tokens))
    assert provenance(tmp_path / "back")["experts"] == []


# -- routers


def test_the_row_from_a_text(run_cli: Any, mixed: Path, models: list[Path], tiny_text: Path, tmp_path: Path) -> None:
    """It answers to its own text more than to other text, on the whole as much as the others, and varies as they do."""
    job = ("upcycle", mixed, tmp_path / "out", *ADD, "--source", models[2], "--calibration", tiny_text, *TEXT)
    made = run_cli(*job, "--json")
    assert made.code == 0, made.stderr
    assert made.json["router"] == "text"
    assert made.json["calibration"]["kinds"]["tiny.txt"] == 8
    drawn = drawn_windows(
        str(tiny_text), load_tokenizer(mixed), samples=16, more=0, sequence_length=32, seed=0, mix=0.5
    )
    own = drawn.of_kind == drawn.kinds.index("tiny.txt")
    model, seen = load(mixed), dict[int, Tensor]()
    for layer, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(lambda _, given, layer=layer: seen.update({layer: given[0]}))
    with torch.no_grad():
        model(drawn.windows, use_cache=False)
    before, after = tensors_of(mixed), tensors_of(tmp_path / "out")
    for layer, inputs in seen.items():
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert after[name][:2].equal(before[name])
        answers = inputs.double() @ after[name].double().T  # [window, token, expert]
        apart = answers - answers[..., :2].mean(-1, keepdim=True)
        assert apart[own, :, 2].mean() > 0 > apart[~own, :, 2].mean()
        deviation = apart.flatten(0, 1).square().mean(0) - apart.flatten(0, 1).mean(0).square()
        assert deviation[2].sqrt().item() == pytest.approx(deviation[:2].mean().sqrt().item(), rel=1e-3)
    kind = stages()["add-expert"]
    options = kind.options_type(source=str(models[2]), calibration=str(tiny_text), samples=16, sequence_length=32)
    run_stage(kind, mixed, tmp_path / "few", options.keeping(1))  # of a layer, one expert in memory at a time
    few = tensors_of(tmp_path / "few")
    assert all(tensor.equal(few[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--calibration", "{text}", "--mix", 0), "leave out --mix 0"),
        (("--calibration", "bundled"), "a text of the new expert's domain"),
    ],
)
def test_a_text_needs_another(
    run_cli: Any, mixed: Path, models: list[Path], tiny_text: Path, tmp_path: Path, options: Any, words: str
) -> None:
    given = [str(word).format(text=tiny_text) for word in options]
    refused = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", models[2], *given, "--dry-run")
    assert refused.code == 2
    assert words in refused.stderr
    assert not (tmp_path / "out").exists()


def test_another_seed_is_another_row(run_cli: Any, mixed: Path, models: list[Path], added: Any, tmp_path: Path) -> None:
    assert run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", models[2], "--seed", 3).code == 0
    one, other = tensors_of(added.path), tensors_of(tmp_path / "out")
    assert {name for name in one if not one[name].equal(other[name])} == {name for name in one if "mlp.gate." in name}


# -- what is told


def test_the_record(run_cli: Any, added: Any, models: list[Path], tmp_path: Path) -> None:
    """Manifest, result, card and text say which experts there are, and where they came from."""
    names = [str(path) for path in models]
    assert added.told["sources"] == names
    assert [origin["model"] for origin in provenance(added.path)["experts"]] == names
    assert added.told["rest_difference"] > 0.1
    assert "Attention, norms and embeddings stay those of the model" in added.told["notes"][-1]
    assert f"expert 2: `{models[2].name}`" in (added.path / "README.md").read_text()
    left = run_cli("compress", added.path, tmp_path / "two", *DROP, "--drop", 1)
    assert "experts      2 left, 2 per token; dropped: 1" in left.stdout
    assert f"made of      {names[0]}, {names[2]}" in left.stdout
    assert [origin["model"] for origin in provenance(tmp_path / "two")["experts"]] == [names[0], names[2]]
    manifest = json.loads((tmp_path / "two" / "moetool.json").read_text())
    assert manifest["recipe"]["drop"] == [1]
    assert manifest["layers"]["0"]["made_of"] == [[0], [2]]
    card = (tmp_path / "two" / "README.md").read_text()
    assert "--drop 1" in card
    assert models[1].name not in card.partition("## Experts")[2].partition("##")[0]
    assert run_cli("verify", tmp_path / "two").code == 0
    bits = ("--method", "quantize", "--bits", 8, "--group-size", 16)
    later = run_cli("compress", tmp_path / "two", tmp_path / "bits", *bits)
    assert later.code == 0, later.stderr
    assert provenance(tmp_path / "bits")["experts"] == provenance(tmp_path / "two")["experts"]


def test_experts_of_one_upcycled_model_are_of_that(
    run_cli: Any, models: list[Path], tiny_text: Path, tmp_path: Path
) -> None:
    """Also after others of every layer are gone; a card lists origins where there are several."""
    made = run_cli("upcycle", models[0], tmp_path / "four", "--method", "vanilla", "--experts", 4)
    assert made.code == 0, made.stderr
    assert "## Experts" not in (tmp_path / "four" / "README.md").read_text()
    few = ("compress", tmp_path / "four", tmp_path / "two", "--method", "reap", "--experts", 2)
    assert run_cli(*few, "--calibration", tiny_text, *TEXT).code == 0
    for before in ("four", "two"):
        more = ("upcycle", tmp_path / before, tmp_path / f"{before}-more", *ADD, "--source", models[1])
        result = run_cli(*more)
        assert result.code == 0, result.stderr
        count = {"four": 4, "two": 2}[before]
        assert f"made of      {count} × {models[0]}, {models[1]}" in result.stdout
        assert "## Experts" in (tmp_path / f"{before}-more" / "README.md").read_text()


def test_a_record_of_an_older_moetool(run_cli: Any, mixed: Path, models: list[Path], tmp_path: Path) -> None:
    """Its recipe names the sources."""
    old = copy_of(mixed, tmp_path / "old")
    manifest = json.loads((old / "moetool.json").read_text())
    del manifest["provenance"]["experts"]
    (old / "moetool.json").write_text(json.dumps({**manifest, "format_version": 4, "digest": ""}))
    made = run_cli("upcycle", old, tmp_path / "out", *ADD, "--source", models[2], "--json")
    assert made.json["sources"] == [str(path) for path in models]


def test_the_same_attention(run_cli: Any, mixed: Path, models: list[Path], tmp_path: Path) -> None:
    """As where only FFNs were trained: nothing is left out."""
    other = copy_of(models[0], tmp_path / "other")
    change_tensors(other, lambda tensors: [tensor.mul_(2) for name, tensor in tensors.items() if ".mlp." in name])
    made = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", other, "--json")
    assert made.json["rest_difference"] == 0
    assert "are those of the model, bit for bit" in made.json["notes"][-1]


@pytest.mark.parametrize("way", ["add", "add from a text", "drop"])
def test_plan_and_bytes(
    run_cli: Any, crash: Any, added: Any, mixed: Path, models: list[Path], tiny_text: Path, tmp_path: Path, way: str
) -> None:
    """The plan tells the bytes; a killed run goes on to the bytes of one that was not; a second run gives the same."""
    more = ("--calibration", tiny_text, *TEXT) if way == "add from a text" else ()
    job: tuple[object, ...] = ("upcycle", mixed, *ADD, "--source", models[2], *more, *SHARDS)
    if way == "drop":
        job = ("compress", added.path, *DROP, "--drop", "0", *SHARDS)
    command, source, *options = job
    plan = run_cli(command, source, tmp_path / "plan", *options, "--dry-run", "--json").json
    assert not (tmp_path / "plan").exists()
    changes = crash.whole(tmp_path / "quiet", job)
    assert plan["output_bytes"] == weight_bytes(tmp_path / "quiet")
    assert len(list((tmp_path / "quiet").glob("*.safetensors"))) > 1
    for part in (1, 2):
        crash.goes_on(tmp_path / str(part), job, part * changes // 3, tmp_path / "quiet")
    assert run_cli(command, source, tmp_path / "poor", *options, "--disk", plan["output_bytes"] // 2).code == 4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["add", "drop"])
def test_two_processes(
    crash: Any, added: Any, mixed: Path, models: list[Path], tiny_text: Path, tmp_path: Path, way: str
) -> None:
    """They share windows and weight files, and give the bytes of one."""
    job: tuple[object, ...] = ("upcycle", mixed, *ADD, "--source", models[2], "--calibration", tiny_text, *TEXT)
    if way == "drop":
        job = ("compress", added.path, *DROP, "--drop", "0")
    assert crash(tmp_path / "one", (*job, *SHARDS))["code"] == 0
    told = crash(tmp_path / "two", (*job, *SHARDS), ranks=2, rank=1)
    assert told["codes"] == [0, 0], told["stderr"]
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert told["changes"] > 1, "the second did nothing"


def test_a_plan_from_configs_alone(run_cli: Any, mixed: Path, models: list[Path], tmp_path: Path) -> None:
    """Before anything is downloaded."""
    for name, path in (("moe", mixed), ("dense", models[2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((path / "config.json").read_bytes())
    job = ("--dry-run", "--json")
    planned = run_cli("upcycle", tmp_path / "moe", tmp_path / "x", *ADD, "--source", tmp_path / "dense", *job)
    assert planned.code == 0, planned.stderr
    known = run_cli("upcycle", mixed, tmp_path / "x", *ADD, "--source", models[2], *job)
    assert planned.json["output_bytes"] == known.json["output_bytes"]
    planned = run_cli("compress", tmp_path / "moe", tmp_path / "x", *DROP, "--drop", "0", "--top-k", 1, *job)
    assert "a router needs two" in planned.stderr


def test_presets(run_cli: Any, mixed: Path, added: Any, models: list[Path], tmp_path: Path) -> None:
    both: dict[str, dict[str, Any]] = {
        "upcycle": {"method": "add-expert", "options": {"source": str(models[2])}},
        "compress": {"method": "drop-experts", "options": {"drop": [2]}},
    }
    for command, said in both.items():
        file = tmp_path / f"{command}.yaml"
        file.write_text(yaml.safe_dump({"command": command, **said}))
        source = mixed if command == "upcycle" else added.path
        made = run_cli(command, source, tmp_path / command, "--preset", file)
        assert made.code == 0, made.stderr
    assert contents(tmp_path / "upcycle") == contents(added.path)
    assert config_of(tmp_path / "compress") == config_of(mixed)


def test_words_that_somebody_may_try(run_cli: Any, mixed: Path, tmp_path: Path) -> None:
    for option, line in (("--add-expert", "upcycle MOE OUTPUT --method add-expert"), ("--drop-expert", "--drop 3,5")):
        refused = run_cli("upcycle", mixed, tmp_path / "out", option, "x")
        assert refused.code == 2
        assert line in refused.stderr
    assert "--method drop-experts" in run_cli("drop-experts", mixed).stderr


# -- refusals


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("olmo2", {"intermediate_size": 64}, ["channels in an FFN, or an expert are 64 there and 48 here"]),
        ("olmo2", {"hidden_size": 64}, ["hidden channels are 64 there and 32 here"]),
        ("olmo2", {"num_hidden_layers": 4}, ["decoder layers are 4 there and 3 here"]),
        ("olmo2", {"vocab_size": 300}, ["different vocabularies", "[300, 32] there and [288, 32] here"]),
        ("olmo2", {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "'silu'"]),
        ("olmo2", {"tie_word_embeddings": True}, ["tie_word_embeddings True", "fine-tuned from the same base"]),
        ("olmo2", {"num_attention_heads": 2}, ["different shapes", "k_norm.weight has shape [32] there"]),
        ("llama", {}, ["is a llama", "was made of a olmo2"]),
        ("gpt_neox", {}, ["is a gpt_neox"]),
    ],
)
def test_a_model_that_does_not_fit(
    run_cli: Any, dense: Any, mixed: Path, tmp_path: Path, family: str, changes: Any, words: list[str]
) -> None:
    """Said before anything is written, with the numbers."""
    other = dense(family, 9, **changes)
    for more in ((), ("--dry-run",)):
        refused = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", other, *more)
        assert refused.code == 3, refused.stdout
        assert all(word in refused.stderr for word in words), refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_family_without_a_record(run_cli: Any, dense: Any, save_model: Any, tmp_path: Path) -> None:
    """Then it is known by what its layers do."""
    published = save_model(families.build("flex_olmo"), tmp_path / "published")
    refused = run_cli("upcycle", published, tmp_path / "out", *ADD, "--source", dense("llama", intermediate_size=24))
    assert refused.code == 3
    assert "it has no norms on whole queries and keys" in refused.stderr
    olmoe = save_model(families.build("olmoe"), tmp_path / "olmoe")
    refused = run_cli("upcycle", olmoe, tmp_path / "out", *ADD, "--source", dense("llama", intermediate_size=24))
    assert refused.code == 3
    assert "is a olmoe: no dense family is known" in refused.stderr


def test_other_positions_and_norms_are_told(run_cli: Any, dense: Any, mixed: Path, tmp_path: Path) -> None:
    """They are the MoE model's; a model with a longer context, say, can be added."""
    other = dense("olmo2", 9, rope_theta=77.0, rms_norm_eps=0.01)
    made = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", other, "--json")
    assert made.code == 0, made.stderr
    assert "has rope_parameters {'rope_theta': 77.0" in made.json["notes"][0]
    assert "has rms_norm_eps 0.01" in made.json["notes"][1]


def test_other_tokens_are_told(run_cli: Any, mixed: Path, models: list[Path], tmp_path: Path) -> None:
    other = swap_tokens(copy_of(models[2], tmp_path / "other"))
    planned = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", other, "--dry-run", "--json")
    assert "differ in 4 entries" in planned.json["note"]


def test_what_is_no_model_to_add_to(
    run_cli: Any, upcycle: Any, models: list[Path], mixed: Path, tmp_path: Path
) -> None:
    refused = run_cli("upcycle", models[0], tmp_path / "out", *ADD, "--source", models[1])
    assert refused.code == 3
    lowrank = upcycle(models[0], "--method", "ders-lowrank", "--experts", 3).path
    refused = run_cli("upcycle", lowrank, tmp_path / "out", *ADD, "--source", models[1])
    assert refused.code == 2
    assert "NEW --format dense-experts" in refused.stderr
    assert run_cli("upcycle", mixed, tmp_path / "out", *ADD).code == 2
    assert run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", mixed).code == 3
    many = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", models[2], "--top-k", 4)
    assert many.code == 2
    assert "--top-k 4: there will be only 3 experts" in many.stderr
    assert not (tmp_path / "out").exists()


def test_an_earlier_result_is_kept(run_cli: Any, added: Any, models: list[Path], tmp_path: Path) -> None:
    """What cannot be done throws nothing away, and no output lies on an input."""
    kept = copy_of(added.path, tmp_path / "kept")
    before = contents(kept)
    assert run_cli("compress", added.path, kept, *DROP, "--drop", 7, "--overwrite").code == 2
    assert run_cli("upcycle", added.path, kept, *ADD, "--source", tmp_path / "none", "--overwrite").code == 3
    other = copy_of(models[2], tmp_path / "other")
    assert run_cli("upcycle", added.path, other, *ADD, "--source", other, "--overwrite").code in (2, 3)
    assert contents(kept) == before


def test_pieces_of_copies(run_cli: Any, upcycle: Any, models: list[Path], tmp_path: Path) -> None:
    """Of fine-grained experts whole copies can go without a word; else it is said, and un-merging is over."""
    fine = upcycle(models[0], "--method", "fine-grained", "--experts", 3, "--granularity", 2, "--no-proof").path
    whole = run_cli("compress", fine, tmp_path / "whole", *DROP, "--drop", "2,3", "--json")
    assert whole.code == 0, whole.stderr
    assert "notes" not in whole.json
    assert run_cli("export", tmp_path / "whole", tmp_path / "dense", "--format", "dense", "--expert", 1).code == 0
    assert all(value.equal(tensors_of(models[0])[name]) for name, value in tensors_of(tmp_path / "dense").items())
    parts = run_cli("compress", fine, tmp_path / "parts", *DROP, "--drop", "2", "--json")
    assert "no longer whole" in parts.json["notes"][0]
    refused = run_cli("export", tmp_path / "parts", tmp_path / "none", "--format", "dense")
    assert refused.code == 3
    assert "no longer whole" in refused.stderr
    again = run_cli("compress", tmp_path / "parts", tmp_path / "fewer", *DROP, "--drop", "2")
    assert again.code == 0, again.stderr  # which leaves 0, 1, 4 and 5, but that nobody knows any more
    assert run_cli("export", tmp_path / "fewer", tmp_path / "none", "--format", "dense").code == 3


def test_more_experts_per_token(run_cli: Any, mixed: Path, models: list[Path], tmp_path: Path, tokens: Tensor) -> None:
    made = run_cli("upcycle", mixed, tmp_path / "out", *ADD, "--source", models[2], "--top-k", 3)
    assert made.code == 0, made.stderr
    assert config_of(tmp_path / "out")["num_experts_per_tok"] == 3
    assert relative_error(logits(tmp_path / "out", tokens), logits(mixed, tokens)) > 1e-3
    changed = change_config(copy_of(tmp_path / "out", tmp_path / "changed"), num_experts_per_tok=2)
    left = run_cli("compress", changed, tmp_path / "left", *DROP, "--drop", "2", "--json")
    assert left.code == 0, left.stderr
    assert logits(tmp_path / "left", tokens).equal(logits(mixed, tokens))
