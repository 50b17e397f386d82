"""Loading through moetool: every tensor is the files', under whatever names, at any width, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, add_prediction_layer, build
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.quiet import quiet
from moetool.runtime.loading import load_model

TOKENS = torch.arange(3, 35).view(2, 16)
ALIASES = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
MakeFile = Callable[..., Path]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS).logits


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(Checkpoint.open(path), dtype)


@pytest.fixture
def rewritten(tiny_mixtral: Path, tmp_path: Path) -> MakeFile:
    """`rewritten(change)`: a copy of a Mixtral whose tensors `change` has got in a dictionary."""

    def make(change: Callable[[dict[str, Tensor]], object]) -> Path:
        path = tmp_path / "model"
        path.mkdir()
        for file in tiny_mixtral.glob("*.json"):
            (path / file.name).write_bytes(file.read_bytes())
        tensors = load_file(tiny_mixtral / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def renamed(tensors: dict[str, Tensor], *, block: str) -> None:
    for name in list(tensors):
        new = name.replace("block_sparse_moe", block)
        for own, alias in ALIASES.items():
            new = new.replace(own, alias)
        tensors[new] = tensors.pop(name)


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_a_mixtral_by_other_names_is_the_same_mixtral(
    block: str, tiny_mixtral: Path, rewritten: MakeFile, run_cli: Any, tiny_text: Path, tmp_path: Path
) -> None:
    path = rewritten(lambda tensors: renamed(tensors, block=block))
    assert "w1" not in str(list(load_file(path / "model.safetensors")))
    whole, model = load(tiny_mixtral), load(path)
    assert logits(model).equal(logits(whole))
    with quiet():
        model.save_pretrained(tmp_path / "saved")
    expected = load_file(tiny_mixtral / "model.safetensors")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == expected.keys()
    options = ("--calibration", tiny_text, "--mix", 0, "--samples", 2, "--sequence-length", 16, "--rank", 4)
    results = [
        run_cli("compress", source, "--method", "d2moe", tmp_path / f"small-{source.name}", *options)
        for source in (path, tiny_mixtral)
    ]
    assert [result.code for result in results] == [0, 0], results[0].stderr
    found, by_hub = (
        load_file(tmp_path / f"small-{source.name}" / "model.safetensors") for source in (path, tiny_mixtral)
    )
    assert found.keys() == by_hub.keys()
    assert all(found[name].equal(tensor) for name, tensor in by_hub.items())


def test_two_names_of_one_tensor_are_refused(rewritten: MakeFile) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
        tensors[name.replace("w1", "gate_proj")] = tensors[name].clone()

    with pytest.raises(InvalidInputError, match=r"gate_proj.* two names of one tensor"):
        load(rewritten(change))


def without(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "all experts of a layer": (without("layers.1.block_sparse_moe.experts."), r"experts\.0\.w1.*12 missing in all"),
    "one expert": (without("layers.1.block_sparse_moe.experts.2."), r"experts\.2\.w1.*3 missing in all"),
    "half of a fused tensor": (without("layers.1.block_sparse_moe.experts.2.w3."), r"experts\.2\.w3.*1 missing"),
    "the head": (without("lm_head"), r"1 tensor is missing from the files \(lm_head\.weight\)"),
    "all queries": (without("q_proj"), r"3 tensors are missing from the files \(model\.layers\.0\.self_attn\.q_proj"),
    "a bias that the config has not": (
        lambda tensors: tensors.update({f"model.layers.{n}.self_attn.q_proj.bias": torch.ones(32) for n in range(3)}),
        r"3 tensors are in the files, but not in the model that config\.json describes \(model\.layers\.0",
    ),
    "a shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
        r"1 tensor is of another shape than config\.json promises \(model\.norm\.weight \[31\] instead of \[32\]\)",
    ),
    "names of no family": (
        lambda tensors: tensors.update({name.replace("w2", "out"): tensors.pop(name) for name in list(tensors)}),
        r"no tensor .*w2\.weight, which",
    ),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_what_transformers_only_warns_of_is_refused(what: str, rewritten: MakeFile) -> None:
    change, told = BROKEN[what]
    path = rewritten(change)
    with pytest.raises(InvalidInputError, match=told):
        load(path)


@pytest.mark.parametrize("command", ["eval", "routing", "tune"])
def test_commands_refuse_it_with_code_3(
    command: str, rewritten: MakeFile, run_cli: Any, tiny_text: Path, tmp_path: Path
) -> None:
    path = rewritten(without("layers.1.block_sparse_moe.experts."))
    output = (tmp_path / "output",) if command == "tune" else ()
    result = run_cli(command, path, *output, "--data", tiny_text, "--sequence-length", 16)
    assert result.code == 3, result.stderr
    assert "12 missing in all" in result.stderr


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "olmoe", "deepseek"])
def test_what_may_be_missed_is_not_missed(family: str, tmp_path: Path) -> None:
    """Tied heads, rotary buffers of old files, and layers that predict further tokens."""
    model = build(family)
    with quiet():
        model.save_pretrained(tmp_path)
    if "num_nextn_predict_layers" in FAMILIES[family]:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    add_prediction_layer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert logits(load(tmp_path)).equal(logits(model))


def test_heads_for_other_tasks_of_an_encoder_are_not_missed(dense_bert: Path) -> None:
    tensors = load_file(dense_bert / "model.safetensors")
    more = {
        "bert.pooler.dense.weight": (32, 32),
        "bert.pooler.dense.bias": (32,),
        "cls.seq_relationship.weight": (2, 32),
    }
    save_file(
        {**tensors, **{name: torch.ones(shape) for name, shape in more.items()}},
        dense_bert / "model.safetensors",
        {"format": "pt"},
    )
    assert logits(load(dense_bert)).isfinite().all()


@pytest.fixture
def dense_bert(tmp_path: Path) -> Path:
    from dense_families import build_dense

    with quiet():
        build_dense("bert").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


# Widths.


def odd(family: str, hidden: int, intermediate: int, path: Path, dtype: torch.dtype) -> Path:
    key = "moe_intermediate_size" if "moe_intermediate_size" in FAMILIES[family] else "intermediate_size"
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    with quiet():
        build(family, dtype=dtype, hidden_size=hidden, **{key: intermediate, **heads}).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "hidden", "intermediate"),
    [("mixtral", 32, 97), ("mixtral", 38, 48), ("deepseek", 38, 25), ("granitemoe", 36, 44), ("granitemoe", 32, 48)],
)
def test_experts_of_any_width(family: str, hidden: int, intermediate: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(odd(family, hidden, intermediate, tmp_path, dtype), dtype)
    model.train()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "experts" in n)
    model.eval()
    told = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=3, pad_token_id=0)
    assert told.shape[0] == 2
    fits = hidden * dtype.itemsize % 16 == 0 and intermediate * dtype.itemsize % 16 == 0
    assert (model.config._experts_implementation == "moetool") is not fits


def test_widths_that_fit_keep_grouped_products(tiny_mixtral: Path) -> None:
    assert load(tiny_mixtral).config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commands_take_odd_widths(
    dtype: torch.dtype, make_mixtral: Any, save_model: Any, run_cli: Any, tiny_text: Path, tmp_path: Path
) -> None:
    """Evaluated, counted, tuned and compressed."""
    sizes = {"hidden_size": 28, "intermediate_size": 45, "num_hidden_layers": 2, "head_dim": 8}
    path = save_model(make_mixtral(dtype=dtype, **sizes), tmp_path / "odd")
    name, few = str(dtype).removeprefix("torch."), ("--sequence-length", 16, "--json")
    scored = run_cli("eval", path, "--data", tiny_text, "--windows", 4, "--compute-dtype", name, *few)
    assert scored.code == 0, scored.stderr
    counted = run_cli("routing", path, "--data", tiny_text, "--windows", 4, "--compute-dtype", name, *few)
    assert counted.code == 0, counted.stderr
    tuned = run_cli("tune", path, tmp_path / "tuned", "--data", tiny_text, "--steps", 2, "--batch-size", 2, *few)
    assert tuned.code == 0, tuned.stderr
    small = run_cli(
        "compress",
        path,
        "--method",
        "d2moe",
        tmp_path / "small",
        "--calibration",
        tiny_text,
        "--mix",
        0,
        "--rank",
        4,
        "--samples",
        2,
        *few,
    )
    assert small.code == 0, small.stderr
    again = run_cli("eval", tmp_path / "small", "--data", tiny_text, "--windows", 4, *few)
    assert again.code == 0, again.stderr
