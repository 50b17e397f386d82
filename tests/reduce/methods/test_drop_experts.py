import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from reduced import config, kept, loaded, logits, never_chosen, weights
from sampling import sampled

from moetool.errors import UsageError
from moetool.job.execute import run_stage
from moetool.job.job import Source
from moetool.job.planning import plan_stage
from moetool.stages import stages

DROP = stages()["drop-experts"]
GROUPED = {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}
# Family, changes to its config, and experts to drop: of groups as many from each.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mixtral": ("mixtral", {}, (1,)),
    "flex_olmo": ("flex_olmo", {}, (0, 4)),
    "qwen3_moe": ("qwen3_moe", {}, (5, 2)),
    "qwen3_moe, not renormalized": ("qwen3_moe", {"norm_topk_prob": False}, (0,)),
    "qwen2_moe": ("qwen2_moe", {}, (1, 2, 3)),
    "olmoe": ("olmoe", {}, (5,)),
    "deepseek_v3": ("deepseek_v3", GROUPED, (1, 6)),
    "granitemoe": ("granitemoe", {}, (0, 3)),
    "granitemoeshared": ("granitemoeshared", {}, (2,)),
    "gpt_oss": ("gpt_oss", {}, (1,)),
    "ernie4_5_moe": ("ernie4_5_moe", {}, (3,)),
    "minimax_m2": ("minimax_m2", {}, (0,)),
}
STRUCTURES = ("flex_olmo", "qwen2_moe", "deepseek_v3", "granitemoe", "gpt_oss", "ernie4_5_moe")


def drop(source: Path, output: Path, **options: Any) -> Path:
    run_stage(DROP, source, output, DROP.options_type(**options))
    return output


def plan(source: Path, **options: Any) -> Any:
    return plan_stage(DROP, source, DROP.options_type(**options))


@pytest.mark.parametrize("case", sampled(FAMILIES, STRUCTURES))
def test_the_result_is_the_original_without_those_experts(
    case: str, model_of: Any, tiny_tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Logits as with those experts' router logits at −∞; all else in the files as it was."""
    family, overrides, dropped = FAMILIES[case]
    source = model_of(family, **overrides)
    output = drop(source, tmp_path / "out", drop=dropped)
    before, after, opened = weights(source), weights(output), Source.open(output)
    left = [one for one in range(Source.open(source).experts.shape.experts) if one not in dropped]
    assert kept(output) == dict.fromkeys(opened.experts.moe_layers, left)
    changed = {key for key, value in config(output).items() if config(source)[key] != value}
    assert [config(output)[key] for key in changed] == [len(left)]
    routers = {name for layer in kept(output) for name in after if opened.architecture.is_router(layer, name)}
    for name in after.keys() - opened.experts.names - opened.experts.biases:
        axis = int(before[name].shape[0] == 1)  # ERNIE's corrections are [1, experts]
        expected = before[name].index_select(axis, torch.tensor(left)) if name in routers else before[name]
        assert after[name].equal(expected)
    original, tokens = loaded(source), tiny_tokens[2000:2064].view(2, 32)
    plain = logits(original, tokens)
    with never_chosen(source, original, kept(output)):
        expected = logits(original, tokens)
    assert not torch.allclose(plain, expected, atol=1e-3)
    torch.testing.assert_close(logits(loaded(output), tokens), expected, rtol=1e-5, atol=1e-5)


def test_fewer_experts_per_token(model_of: Any, tmp_path: Path, tiny_tokens: torch.Tensor) -> None:
    source = model_of("flex_olmo", num_experts_per_tok=3)
    with pytest.raises(UsageError, match=r"leaves 2 of 6 experts, too few\. .*takes 3 of 6 .*With --top-k 2 it"):
        plan(source, drop=[0, 1, 2, 3])
    with pytest.raises(UsageError, match="--top-k 4: the router takes 3"):
        plan(source, drop=[0], top_k=4)
    output = drop(source, tmp_path / "out", drop=[0, 1, 2, 3], top_k=2)
    assert (config(output)["num_experts"], config(output)["num_experts_per_tok"]) == (2, 2)
    assert logits(loaded(output), tiny_tokens[None, :16]).isfinite().all()


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ((9,), "--drop 9: there are experts 0 to 3"),
        ((-1,), "--drop -1: there are experts 0 to 3"),
        ((0, 1, 2, 3), "leaves 0 of 4 experts, and a router needs two"),
        ((0, 1, 2), "leaves 1 of 4 experts.*export --format dense --expert N"),
        ((), "--drop names no expert"),
    ],
)
def test_refused(dropped: tuple[int, ...], message: str, model_of: Any) -> None:
    with pytest.raises(UsageError, match=message):
        plan(model_of("mixtral"), drop=dropped)


def test_groups_lose_as_many_each(model_of: Any) -> None:
    source = model_of("deepseek_v3", **GROUPED)
    with pytest.raises(UsageError, match=r"takes 2, 1 experts from the router's 2 groups, of 4 each \(0 to 3"):
        plan(source, drop=[0, 1, 6])
    assert plan(source, drop=[0, 1, 6, 7]).details["experts_left"] == 4


def test_layers_that_predict_further_tokens_go(model_of: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_of("deepseek_v3", n_group=2, topk_group=1), source)
    families.add_prediction_layer(source)
    output = drop(source, tmp_path / "out", drop=[0, 4])
    assert config(output)["num_nextn_predict_layers"] == 0
    assert "predict further tokens" in plan(source, drop=[0, 4]).details["note"]


def test_a_compressed_model_is_refused(model_of: Any, reduce: Any) -> None:
    compressed = Path(reduce(model_of("mixtral"), "d2moe", ratio=0.2).output)
    with pytest.raises(UsageError, match="is a moetool checkpoint"):
        plan(compressed, drop=[1])
