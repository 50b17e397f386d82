"""Un-merging undoes upcycling: the very tensors that an MoE model was made from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from upcycled import EXPERTS, load, logits, open_dense, save_dense, upcycled, write_made, write_upcycled

from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.convert.parts import REST
from moetool.errors import InvalidInputError
from moetool.export.unmerging import Unmerging, dense_config
from moetool.format.families import architecture_of
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Copies, PartlyRedrawn, Pieces
from moetool.upcycle.upcycling import Upcycled


def unmerging(made: Path, model: Upcycled, **options: Any) -> Unmerging:
    checkpoint = Checkpoint.open(made)
    own = not model.target.is_native
    options["native"] = not own
    experts = ExpertReader(checkpoint, architecture_of(checkpoint.config))
    options.setdefault("expert", 0)
    if model.spec.shared == "half" and not own:
        options["down_scale"] = 0.5
    dense = model.dense
    return Unmerging(checkpoint, experts, dense.architecture, dense.checkpoint.tensors, model.spec.layers, **options)


def tensors_of(unmerged: Unmerging, path: Path) -> Mapping[str, Tensor]:
    made = [one for _, unit in unmerged.units() for one in unit]
    return load_file(write_made(path, made, {}) / "model.safetensors")


def same(found: Mapping[str, Tensor], dense: DenseModel) -> bool:
    before = load_file(dense.checkpoint.path / "model.safetensors")
    return found.keys() == before.keys() and all(
        found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in before.items()
    )


WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "mixtral", {}),
    ("llama", "granitemoe", {}),
    ("llama", "granitemoeshared", {"shared": "half"}),
    ("llama", "qwen2_moe", {"shared": "half", "layers": (0, 2)}),
    ("llama", "qwen2_moe", {"shared": "med"}),
    ("llama", "moetool", {"shared": "half"}),
    ("llama-mlp-bias", "moetool", {"layers": (1,)}),
    ("qwen2", "qwen2_moe", {}),
    ("qwen2", "granitemoe", {}),
    ("qwen3", "qwen3_moe", {"layers": (1,)}),
    ("olmo2", "flex_olmo", {}),
    ("phi3", "mixtral", {}),
    ("phi3", "qwen2_moe", {"layers": (0,)}),
    ("phi3", "moetool", {}),
    ("granite", "granitemoe", {}),
    ("gemma", "moetool", {}),
    ("gpt_neox", "moetool", {}),
    ("falcon", "moetool", {"shared": "xft"}),
]


@pytest.mark.parametrize("granularity", [1, 4])
@pytest.mark.parametrize(("family", "target", "shape"), WAYS)
def test_back_to_the_very_tensors(
    family: str, target: str, shape: dict[str, Any], granularity: int, tmp_path: Path
) -> None:
    """Fp32 holds halves and fourfolds exactly."""
    dense = open_dense(save_dense(tmp_path / "dense", family))
    pieces = {"experts": Pieces(dense, granularity, dense.dtype), "granularity": granularity}
    model = upcycled(dense, target, **shape, **(pieces if granularity > 1 else {}))
    unmerged = unmerging(write_upcycled(tmp_path / "made", model), model, expert=3, granularity=granularity)
    assert same(tensors_of(unmerged, tmp_path / "back"), dense)


def test_norms_kept_less_one_come_back_as_near_as_fp32_allows(tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "gemma"))
    model = upcycled(dense, "granitemoe")
    found = tensors_of(unmerging(write_upcycled(tmp_path / "made", model), model), tmp_path / "back")
    before = load_file(tmp_path / "dense" / "model.safetensors")
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        if name.endswith("norm.weight"):
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2**-23)
        else:
            assert found[name].equal(tensor)


def test_bf16_norms_come_back_exactly_through_fp32(tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "gemma", dtype=torch.bfloat16))
    model = upcycled(dense, "granitemoe", dtype=torch.float32)
    unmerged = unmerging(write_upcycled(tmp_path / "made", model), model, dtype=torch.bfloat16)
    assert same(tensors_of(unmerged, tmp_path / "back"), dense)


def test_the_expert_that_was_asked_for(tmp_path: Path) -> None:
    sources = [open_dense(save_dense(tmp_path / str(seed), "phi3", seed=seed)) for seed in range(2)]
    model = upcycled(sources[0], experts=Copies(sources))
    made = write_upcycled(tmp_path / "made", model)
    second = tensors_of(unmerging(made, model, expert=1), tmp_path / "one")
    stored = [load_file(source.checkpoint.path / "model.safetensors") for source in sources]
    for name, tensor in second.items():
        assert tensor.equal(stored[1 if ".mlp." in name else 0][name]), name
    assert same(tensors_of(unmerging(made, model, expert=2), tmp_path / "two"), sources[0])


@pytest.mark.parametrize("target", ["mixtral", "moetool"])
def test_what_was_redrawn_is_what_comes_back(target: str, tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "llama"))
    redrawn = PartlyRedrawn(dense, 0.5, seed=0)
    model = upcycled(dense, target, experts=redrawn)
    made = write_upcycled(tmp_path / "made", model)
    for expert in range(EXPERTS):
        found = tensors_of(unmerging(made, model, expert=expert), tmp_path / str(expert))
        for role in dense.architecture.roles:
            name = dense.architecture.weight_name(1, role)
            assert found[name].equal(redrawn.matrix(1, expert, role))


def test_units_go_layer_by_layer(tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "llama"))
    model = upcycled(dense)
    prefixes = dense.architecture.layer_prefixes
    units = unmerging(write_upcycled(tmp_path / "made", model), model).units()
    assert [layer for layer, _ in units] == [REST, 0, 1, 2]
    for layer, unit in units:
        names = {made.spec.name for made in unit}
        own = {name for name in dense.checkpoint.tensors if layer != REST and name.startswith(prefixes[layer])}
        assert names == (own or {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


def test_an_moe_model_of_another_source_is_refused(tmp_path: Path) -> None:
    dense = open_dense(save_dense(tmp_path / "dense", "llama"))
    model = upcycled(dense)
    made = Checkpoint.open(write_upcycled(tmp_path / "made", model))
    other = open_dense(save_dense(tmp_path / "other", "llama", attention_bias=True))
    with pytest.raises(InvalidInputError, match=r"no tensor model\.layers\.0\.self_attn\.k_proj\.bias of shape \[16\]"):
        Unmerging(
            made,
            ExpertReader(made, architecture_of(made.config)),
            other.architecture,
            other.checkpoint.tensors,
            (0, 1, 2),
            expert=0,
        )


@pytest.mark.parametrize(
    ("family", "target", "sibling"),
    [
        ("mistral", "mixtral", "MistralForCausalLM"),
        ("qwen3", "qwen3_moe", "Qwen3ForCausalLM"),
        ("olmo2", "flex_olmo", "Olmo2ForCausalLM"),
        ("granite", "granitemoe", "GraniteForCausalLM"),
    ],
)
def test_a_sibling_can_be_named_for_moe_models_of_other_origin(
    family: str, target: str, sibling: str, tmp_path: Path
) -> None:
    """With its config alone, the un-merged model computes what the dense one did."""
    dense = open_dense(save_dense(tmp_path / "dense", family))
    model = upcycled(dense, target)
    made = write_upcycled(tmp_path / "made", model)
    config = dense_config(model.config(), tmp_path)
    assert config is not None
    assert config["architectures"] == [sibling]
    assert config["intermediate_size"] == 48
    assert not any("expert" in key or "router" in key for key in config)
    tensors_of(unmerging(made, model), tmp_path / "back")
    (tmp_path / "back" / "config.json").unlink()
    units = unmerging(made, model).units()
    write_made(tmp_path / "sibling", [one for _, unit in units for one in unit], config)
    assert logits(load(tmp_path / "sibling")).equal(logits(load(tmp_path / "dense")))


def test_families_without_a_dense_sibling(tmp_path: Path) -> None:
    assert dense_config({"model_type": "qwen2_moe", "num_experts": 4}, tmp_path) is None
    assert dense_config({}, tmp_path) is None
