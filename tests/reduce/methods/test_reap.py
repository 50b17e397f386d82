import re
import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import change_tensors, copy_of
from reduced import config, kept, loaded, logits, made_of, never_chosen, weights
from sampling import sampled

from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.job.job import Source
from moetool.reduce.scores import Saliency

FAMILIES = {
    "mixtral": ("mixtral", {}, 3),
    "qwen3_moe": ("qwen3_moe", {}, 4),
    "qwen3_moe, not renormalized": ("qwen3_moe", {"norm_topk_prob": False}, 3),
    "qwen2_moe": ("qwen2_moe", {}, 4),
    "olmoe": ("olmoe", {}, 2),
    "deepseek_v2": ("deepseek_v2", {"n_group": 2, "topk_group": 1}, 4),
    "deepseek_v3": ("deepseek_v3", {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}, 6),
    "deepseek_v3, no groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}, 5),
    "granitemoe": ("granitemoe", {}, 2),
    "phimoe": ("phimoe", {}, 3),
    "ernie4_5_moe": ("ernie4_5_moe", {}, 4),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}, 4),
    "minimax_m2": ("minimax_m2", {}, 4),
    "lfm2_moe": ("lfm2_moe", {}, 4),
    "exaone_moe": ("exaone_moe", {"n_group": 2, "topk_group": 1}, 6),
    "afmoe": ("afmoe", {}, 4),
}


# Plain, grouped, stacked, and with corrections of several shapes.
STRUCTURES = ("mixtral", "qwen2_moe", "deepseek_v3", "granitemoe", "phimoe", "ernie4_5_moe", "lfm2_moe", "afmoe")


@pytest.fixture(params=sampled(FAMILIES, STRUCTURES))
def case(request: pytest.FixtureRequest, model_of: Any) -> tuple[Path, int]:
    family, overrides, experts = FAMILIES[request.param]
    return model_of(family, **overrides), experts


def test_a_pruned_model_is_the_original_with_those_logits_at_minus_infinity(
    case: tuple[Path, int], reduce: Any, tiny_tokens: torch.Tensor
) -> None:
    source, experts = case
    output = Path(reduce(source, "reap", experts=experts).output)
    original, tokens = loaded(source), tiny_tokens[2000:2064].view(2, 32)
    plain = logits(original, tokens)
    with never_chosen(source, original, kept(output)):
        expected = logits(original, tokens)
    found = logits(loaded(output), tokens)
    assert not torch.allclose(plain, expected, atol=1e-2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_output_is_an_ordinary_checkpoint(case: tuple[Path, int], reduce: Any) -> None:
    source, experts = case
    output = Path(reduce(source, "reap", experts=experts).output)
    changed = {key for key, value in config(output).items() if config(source)[key] != value}
    assert config(output).keys() == config(source).keys()
    assert len(changed) == 1
    assert config(output)[changed.pop()] == experts
    before, after = weights(source), weights(output)
    opened = Source.open(output)
    routers: set[str] = set()
    for layer, experts_kept in kept(output).items():
        for name in (name for name in after if opened.architecture.is_router(layer, name)):
            axis = int(before[name].shape[0] == 1)  # ERNIE's corrections are [1, experts]
            assert after[name].equal(before[name].index_select(axis, torch.tensor(experts_kept)))
            routers.add(name)
    for name, tensor in after.items():
        assert name in opened.experts.names or name in routers or tensor.equal(before[name])


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "granitemoe"])
def test_the_score_is_the_mean_of_weighted_norms(
    family: str, model_of: Any, tiny_tokens: torch.Tensor, tmp_path: Path
) -> None:
    """By hooks on the model as transformers runs it."""
    path = model_of(family)
    model, source = loaded(path), Source.open(path)
    windows = tiny_tokens[:256].view(8, 32)
    given: dict[int, list[tuple[Any, ...]]] = {layer: [] for layer in source.experts.moe_layers}
    modules = {}
    for layer, calls in given.items():
        place = f"{source.architecture.layer.format(layer=layer)}.{source.architecture.experts_module}"
        modules[layer] = model.get_submodule(place)
        modules[layer].register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args))
    logits(model, windows)
    sweep = Sweep(
        StreamedModel(source.checkpoint, source.architecture, torch.float32, torch.device("cpu")), windows, tmp_path
    )
    sweep.embed()
    for layer in range(sweep.model.layer_count):
        with sweep.model.layer(layer) as loaded_layer:
            if layer not in given:
                sweep.forward(layer, loaded_layer)
                continue
            scores = Saliency(source.experts.shape.experts)
            sweep.forward(layer, loaded_layer, [scores])
        [(hidden, chosen, taken)] = given[layer]
        experts = modules[layer]
        for expert in range(source.experts.shape.experts):
            rows, slots = torch.where(chosen == expert)
            gate, up = (hidden[rows].double() @ experts.gate_up_proj[expert].double().T).chunk(2, dim=-1)
            outputs = (experts.act_fn(gate) * up) @ experts.down_proj[expert].double().T
            expected = (taken[rows, slots].double() * outputs.norm(dim=-1)).mean()
            assert int(scores.tokens[expert]) == len(rows)
            found = scores.total[expert] / len(rows)
            assert abs(found - expected) <= 1e-6 * expected


def test_layers_that_predict_further_tokens_are_left_out(model_of: Any, reduce: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_of("deepseek_v3", n_group=2, topk_group=1), source)
    families.add_prediction_layer(source)
    output = Path(reduce(source, "reap", ratio=0.1).output)
    before, after = weights(source), weights(output)
    last = config(source)["num_hidden_layers"]
    assert any(f".layers.{last}." in name for name in before)
    assert not any(f".layers.{last}." in name for name in after)
    assert config(output)["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("method", ["reap", "m-smoe"])
def test_experts_of_two_dtypes(run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, method: str) -> None:
    """Some matrices in bf16, some in fp32: those that are left have the numbers that they had."""

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if re.search(r"experts\.([023]\.w1|\d\.w2)\.", name):
                tensors[name] = tensors[name].bfloat16()

    source = change_tensors(copy_of(tiny_mixtral, tmp_path / "source"), narrow)
    options = ("--method", method, "--experts", 2, "--calibration", tiny_text, "--samples", 4, "--mix", 0)
    made = run_cli("compress", source, tmp_path / "out", *options, "--sequence-length", 32)
    assert made.code == 0, made.stderr
    before, after = weights(source), weights(tmp_path / "out")
    for layer, experts in made_of(tmp_path / "out").items():
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        for role, dtype in (("w1", torch.float32), ("w2", torch.bfloat16), ("w3", torch.float32)):
            assert {after[f"{prefix}.{place}.{role}.weight"].dtype for place in range(2)} == {dtype}
            for place, members in enumerate(experts):
                if len(members) == 1:
                    own = before[f"{prefix}.{members[0]}.{role}.weight"]
                    assert after[f"{prefix}.{place}.{role}.weight"].equal(own.to(dtype))
