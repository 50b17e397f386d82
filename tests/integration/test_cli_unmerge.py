"""`moetool export --format dense`: one expert per layer back in the place of them all."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import (
    WEIGHTS,
    change_config,
    config_of,
    contents,
    copy_of,
    load,
    load_whole,
    logits,
    relative_error,
    tensors_of,
    weight_bytes,
)
from dense_families import DENSE_FAMILIES
from safetensors.torch import load_file
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor

FOUR = ("--experts", 4)
LAYERS = 3


@pytest.fixture
def unmerge(run_cli: Any, tmp_path: Path) -> Any:
    """`unmerge(source, *options)`: what `export --format dense` makes of an MoE model."""

    def run(source: Path, *options: object) -> Path:
        output = tmp_path / f"dense-{len(list(tmp_path.glob('dense-*')))}"
        result = run_cli("export", source, output, "--format", "dense", *options)
        assert result.code == 0, result.stderr
        return output

    return run


def differing(found: Path, expected: Path) -> set[str]:
    """Names of tensors that are not bit for bit the same, dtype included, or not in both."""
    one, other = tensors_of(found), tensors_of(expected)
    common = {name for name in one.keys() & other.keys() if one[name].dtype == other[name].dtype}
    return (one.keys() | other.keys()) - {name for name in common if one[name].equal(other[name])}


# In fp32, what Gemma's norms lose when one is added to their weights does not come back.
EXACT = [family for family in DENSE_FAMILIES if family != "gemma"]


@pytest.mark.parametrize("family", sampled(EXACT, [*DENSE_STRUCTURES, "olmo2"]))
def test_vanilla_gives_back_the_source(dense: Any, upcycle: Any, unmerge: Any, family: str) -> None:
    source = dense(family)
    made = upcycle(source, *FOUR)
    for expert in (0, 3):
        found = unmerge(made.path, "--expert", expert)
        assert not differing(found, source)
        assert config_of(found) == config_of(source)
    sidecars = contents(found).keys() - {"moetool.json", "README.md"}
    assert sidecars == contents(source).keys()
    assert all(contents(found)[name] == contents(source)[name] for name in sidecars if "token" in name)
    load_whole(found)


def test_gemma_comes_back_but_for_rounding(dense: Any, upcycle: Any, unmerge: Any, tokens: Tensor) -> None:
    source = dense("gemma")
    found = unmerge(upcycle(source, *FOUR).path)
    assert all(name.endswith("norm.weight") for name in differing(found, source))
    before, after = tensors_of(source), tensors_of(found)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=2**-24)
    assert relative_error(logits(found, tokens), logits(source, tokens)) < 1e-6


WAYS = (
    ("llama", "--method fine-grained --granularity 4"),
    ("llama", "--method fine-grained --granularity 2 --target moetool"),
    ("llama", "--method fine-grained --granularity 4 --shared half"),
    ("llama", "--method fine-grained --granularity 2 --shared half --target moetool"),
    ("llama", "--shared half"),
    ("llama", "--shared half --target qwen2_moe"),
    ("llama", "--shared half --layers 0,2"),
    ("llama", "--shared xft"),
    ("llama", "--shared med"),
    ("llama", "--layers 1 --target moetool"),
    ("llama", "--method drop --drop 0 --target granitemoe"),
    ("llama", "--router-std 1 --shard-size 100kB"),
    ("phi3", "--method fine-grained --granularity 2"),
    ("phi3", "--method fine-grained --granularity 2 --target moetool --layers 2"),
    ("phi3", "--shared half --layers 1"),
    ("qwen2", "--target granitemoe"),
    ("qwen2-windows", "--layers 0"),
    ("gemma2", "--method fine-grained --granularity 2"),
    ("llama-mlp-bias", "--method fine-grained --granularity 2 --shared half"),
    ("gpt_neox", "--method fine-grained --granularity 4 --layers 0,1"),
    ("llama-wide-heads", "--shared half"),
)


@pytest.mark.parametrize(("family", "options"), sampled(WAYS, WAYS[1::4]))
def test_other_ways_of_upcycling(dense: Any, upcycle: Any, unmerge: Any, family: str, options: str) -> None:
    source = dense(family)
    found = unmerge(upcycle(source, *FOUR, *options.split()).path, "--expert", 2)
    assert not differing(found, source)
    assert config_of(found) == config_of(source)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", "--method fine-grained --granularity 4 --shared half"),
        ("llama", "--dtype float32"),
        ("llama", "--dtype float32 --target moetool"),
        ("llama", "--dtype float32 --method fine-grained --granularity 2"),
        ("phi3", "--shared half"),
        ("gemma", ""),
        ("gpt_neox", "--dtype float32"),
    ],
)
def test_bf16_comes_back_in_bf16(dense: Any, upcycle: Any, unmerge: Any, family: str, options: str) -> None:
    source = dense(family, dtype=torch.bfloat16)
    found = unmerge(upcycle(source, *FOUR, *options.split()).path, "--expert", 1)
    assert not differing(found, source)
    assert config_of(found) == config_of(source)


def test_a_redrawn_expert(dense: Any, upcycle: Any, unmerge: Any, tokens: Tensor) -> None:
    """Only the feed-forward networks are other ones, and each expert has its own."""
    source = dense("llama")
    made = upcycle(source, *FOUR, "--method", "drop")
    moe, before = tensors_of(made.path), tensors_of(source)
    for expert in range(4):
        found = tensors_of(unmerge(made.path, "--expert", expert))
        assert found.keys() == before.keys()
        for name, tensor in found.items():
            if ".mlp." not in name:
                assert tensor.equal(before[name])
        for layer in range(LAYERS):
            own = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            for role, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                dense_name = f"model.layers.{layer}.mlp.{role}_proj.weight"
                assert found[dense_name].equal(moe[f"{own}{name}.weight"])
                assert not found[dense_name].equal(before[dense_name])


@pytest.mark.parametrize(
    ("family", "options"),
    sampled(
        [("llama", ()), ("llama", ("--shared", "half")), ("phi", ()), ("phi", ("--shared", "xft"))],
        [("llama", ("--shared", "half")), ("phi", ())],
    ),
)
def test_an_moe_model_that_was_compressed_since(
    run_cli: Any, dense: Any, upcycle: Any, unmerge: Any, tmp_path: Path, family: str, options: Any
) -> None:
    """Equal experts have no differences, so that what is compressed away is nothing."""
    source = dense(family)
    small = ("--method", "ders-quantize", "--bits", 2, "--group-size", 16)
    assert run_cli("compress", upcycle(source, *FOUR, *options).path, tmp_path / "small", *small).code == 0
    result = run_cli("export", tmp_path / "small", tmp_path / "whole", "--format", "dense-experts")
    assert result.code == 0, result.stderr
    before = tensors_of(source)
    for compressed in ("small", "whole"):
        after = tensors_of(unmerge(tmp_path / compressed))
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["reap", "m-smoe"])
@pytest.mark.parametrize(("family", "options"), [("qwen2", ()), ("llama", ("--shared", "half")), ("gemma", ())])
def test_an_moe_model_that_lost_experts_since(
    run_cli: Any,
    dense: Any,
    upcycle: Any,
    unmerge: Any,
    tiny_text: Path,
    tmp_path: Path,
    method: str,
    family: str,
    options: Any,
) -> None:
    """Whichever each layer has lost: the dense model is of the family that it was, and one more can come as it came."""
    source = dense(family)
    text = ("--calibration", tiny_text, "--samples", 4, "--sequence-length", 64)
    moe = upcycle(source, *FOUR, *options).path
    result = run_cli("compress", moe, tmp_path / "fewer", "--method", method, "--ratio", 0.1, *text)
    assert result.code == 0, result.stderr
    after, before = tensors_of(unmerge(tmp_path / "fewer")), tensors_of(unmerge(moe))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-7)
    adding = ("--method", "add-expert", "--source", source)
    result = run_cli("upcycle", tmp_path / "fewer", tmp_path / "more", *adding)
    assert result.code == 0, result.stderr
    assert not differing(unmerge(tmp_path / "more", "--expert", 3), unmerge(moe))


def test_pieces_are_no_dense_model(run_cli: Any, dense: Any, upcycle: Any, tiny_text: Path, tmp_path: Path) -> None:
    """A fourth of an FFN in a layer's place would be a model, and give nonsense."""
    fine = upcycle(dense("llama"), *FOUR, "--method", "fine-grained", "--granularity", 4).path
    text = ("--calibration", tiny_text, "--samples", 4, "--sequence-length", 64)
    assert run_cli("compress", fine, tmp_path / "fewer", "--method", "reap", "--ratio", 0.1, *text).code == 0
    result = run_cli("export", tmp_path / "fewer", tmp_path / "out", "--format", "dense", "--dry-run")
    assert result.code == 3
    assert "no longer whole" in result.stderr


# -- MoE models that moetool did not make


@pytest.mark.parametrize("expert", [0, 3])
def test_a_mixtral_from_elsewhere(tiny_mixtral: Path, unmerge: Any, tokens: Tensor, expert: int) -> None:
    """A Mistral that transformers loads, and that computes what the Mixtral does where it has no other choice."""
    found = unmerge(tiny_mixtral, "--expert", expert)
    model = load_whole(found)
    assert type(model).__name__ == "MistralForCausalLM"
    config = config_of(found)
    assert config["model_type"] == "mistral"
    assert not [key for key in config if "expert" in key or "router" in key]
    before, after = load_file(tiny_mixtral / WEIGHTS), tensors_of(found)
    for name, tensor in before.items():
        if "block_sparse_moe" not in name:
            assert after.pop(name).equal(tensor)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
        for role, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            assert after.pop(f"model.layers.{layer}.mlp.{role}_proj.weight").equal(before[f"{own}{name}.weight"])
    assert not after
    with torch.inference_mode():
        expected = only(load(tiny_mixtral), expert)(input_ids=tokens, use_cache=False).logits
        assert relative_error(model(input_ids=tokens, use_cache=False).logits, expected) < 1e-5


def only(model: Any, expert: int) -> Any:
    """An MoE model whose experts are all this one."""
    for module in model.modules():
        if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
            for parameter in (module.gate_up_proj, module.down_proj):
                parameter.data.copy_(parameter.data[expert].expand_as(parameter))
    return model


@pytest.mark.parametrize(
    ("family", "sibling"), [("qwen3_moe", "qwen3"), ("granitemoe", "granite"), ("flex_olmo", "olmo2")]
)
def test_other_families_with_a_dense_sibling(
    save_model: Any, unmerge: Any, tokens: Tensor, tmp_path: Path, family: str, sibling: str, monkeypatch: Any
) -> None:
    if family == "qwen3_moe":
        monkeypatch.setitem(families.FAMILIES, family, {**families.FAMILIES[family], "decoder_sparse_step": 1})
    source = save_model(families.build(family), tmp_path / "model")
    model = load_whole(unmerge(source, "--expert", 1))
    assert model.config.model_type == sibling
    with torch.inference_mode():
        expected = only(load(source), 1)(input_ids=tokens, use_cache=False).logits
        assert relative_error(model(input_ids=tokens, use_cache=False).logits, expected) < 1e-5


# -- jobs


def test_a_dry_run_knows_the_bytes(run_cli: Any, dense: Any, upcycle: Any, unmerge: Any, tmp_path: Path) -> None:
    for family, options in (("llama", ()), ("phi3", ()), ("gpt_neox", ("--shared", "half"))):
        made = upcycle(dense(family), *FOUR, *options)
        arguments = ("export", made.path, tmp_path / "out", "--format", "dense", "--dry-run")
        plan = run_cli(*arguments, "--json").json
        assert not (tmp_path / "out").exists()
        assert plan["input_bytes"] == weight_bytes(made.path)
        assert plan["output_bytes"] == weight_bytes(unmerge(made.path)) == weight_bytes(dense(family))
        assert plan["model_type"] == family
        assert "Nothing was written" in run_cli(*arguments).stdout


def test_a_killed_job_resumes_to_the_same_bytes(crash: Any, dense: Any, upcycle: Any, tmp_path: Path) -> None:
    source = dense("phi3")
    arguments = ("export", upcycle(source, *FOUR).path, "--format", "dense", "--shard-size", "60kB")
    crash.whole(tmp_path / "quiet", arguments)
    assert len(list((tmp_path / "quiet").glob("*.safetensors"))) > 1
    assert not differing(tmp_path / "quiet", source)
    for at in (8, 15):
        assert crash(tmp_path / str(at), arguments, at=at)["code"] == -signal.SIGKILL
        assert not (tmp_path / str(at) / "config.json").exists()
        assert crash(tmp_path / str(at), (*arguments, "--resume"))["code"] == 0
        assert contents(tmp_path / str(at)) == contents(tmp_path / "quiet")


# -- what cannot be used


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--expert 4", ["--expert 4", "experts 0 to 3"]),
        ("--expert -1", ["--expert", "0"]),
        ("--expert first", ["--expert"]),
    ],
)
@pytest.mark.parametrize("kind", ["native", "own", "pieces", "foreign"])
def test_a_bad_option(
    run_cli: Any,
    dense: Any,
    upcycle: Any,
    tiny_mixtral: Path,
    tmp_path: Path,
    kind: str,
    options: str,
    words: list[str],
) -> None:
    source = {
        "native": lambda: upcycle(dense("llama"), *FOUR).path,
        "own": lambda: upcycle(dense("gpt_neox"), *FOUR).path,
        "pieces": lambda: upcycle(dense("llama"), *FOUR, "--method", "fine-grained", "--granularity", 4).path,
        "foreign": lambda: tiny_mixtral,
    }[kind]()
    result = run_cli("export", source, tmp_path / "out", "--format", "dense", *options.split())
    assert result.code == 2, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.lower().startswith("error: ")
    assert all(word in last for word in words), last
    assert not (tmp_path / "out").exists()


def test_an_unknown_format(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    result = run_cli("export", tiny_mixtral, tmp_path / "out", "--format", "sparse")
    assert result.code == 2
    assert all(word in result.stderr for word in ("--format sparse", "dense-experts", "dense"))
    assert not (tmp_path / "out").exists()


def test_a_dense_model(run_cli: Any, dense: Any, tmp_path: Path) -> None:
    result = run_cli("export", dense("llama"), tmp_path / "out", "--format", "dense")
    assert result.code == 3
    assert "not an MoE model" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "phimoe"])
def test_a_family_without_a_dense_sibling(run_cli: Any, save_model: Any, tmp_path: Path, family: str) -> None:
    source = save_model(families.build(family), tmp_path / "model")
    result = run_cli("export", source, tmp_path / "out", "--format", "dense")
    assert result.code == 3, result.stderr
    assert f"no dense family with the layers of {family}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_upcycled_model_whose_record_is_gone(dense: Any, upcycle: Any, unmerge: Any, tmp_path: Path) -> None:
    """It is an MoE model like any other then, of the dense family that is beside it."""
    source = dense("llama")
    path = copy_of(upcycle(source, *FOUR).path, tmp_path / "copy")
    (path / "moetool.json").unlink()
    found = unmerge(path)
    assert config_of(found)["model_type"] == "mistral"
    assert not differing(found, source)
    load_whole(found)


def test_files_that_are_damaged(run_cli: Any, dense: Any, upcycle: Any, tmp_path: Path) -> None:
    path = copy_of(upcycle(dense("llama"), *FOUR).path, tmp_path / "copy")
    change_config(path, num_local_experts=6)
    result = run_cli("export", path, tmp_path / "out", "--format", "dense")
    assert result.code == 3
    assert "6 experts" in result.stderr
    data = json.loads((path / "moetool.json").read_text())
    shutil.rmtree(path)
    copy_of(upcycle(dense("llama"), *FOUR).path, path)
    (path / "moetool.json").write_text(json.dumps(data)[:100])
    result = run_cli("export", path, tmp_path / "out", "--format", "dense")
    assert result.code == 3
    assert "moetool.json" in result.stderr
    assert not (tmp_path / "out").exists()
