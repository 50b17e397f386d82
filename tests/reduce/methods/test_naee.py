import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reduced import kept, loaded, logits, never_chosen
from sampling import sampled

from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.errors import UsageError
from moetool.job.job import Source
from moetool.job.planning import plan_stage
from moetool.reduce.choosing import Fewer
from moetool.reduce.subsets import subset_count, subsets
from moetool.stages import stages

NAEE = stages()["naee"]
CASES = {
    "mixtral": ({}, 2),
    "qwen2_moe": ({}, 4),
    "deepseek_v3": ({"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}, 6),
    "granitemoe": ({}, 3),
    "ernie4_5_moe": ({}, 4),
    "afmoe": ({}, 4),
}


@pytest.mark.parametrize("family", sampled(CASES, ["mixtral", "deepseek_v3", "afmoe"]))
def test_it_finds_what_brute_force_finds(family: str, model_of: Any, reduce: Any, tiny_text: Path) -> None:
    """Every subset in the model itself, as transformers runs it with the other logits at −∞."""
    overrides, experts = CASES[family]
    source = model_of(family, **overrides)
    output = Path(reduce(source, "naee", experts=experts).output)
    windows = sample_windows(str(tiny_text), load_tokenizer(source), samples=8, sequence_length=32, seed=0)
    opened, model = Source.open(source), loaded(source)
    count, groups = opened.experts.shape.experts, overrides.get("n_group", 1)
    for layer in opened.experts.moe_layers[-2:]:
        losses: dict[tuple[int, ...], float] = {}
        before = given(source, model, layer, windows, range(count))
        for subset in itertools.combinations(range(count), experts):
            if len({sum(expert * groups // count == group for expert in subset) for group in range(groups)}) == 1:
                losses[subset] = float((given(source, model, layer, windows, subset) - before).square().sum())
        assert kept(output)[layer] == list(min(losses, key=lambda subset: losses[subset]))


def given(path: Path, model: Any, layer: int, windows: torch.Tensor, allowed: Sequence[int]) -> torch.Tensor:
    """What the experts of one layer give with some of them alone."""
    source, found = Source.open(path), []
    place = f"{source.architecture.layer.format(layer=layer)}.{source.architecture.experts_module}"
    hook = model.get_submodule(place).register_forward_hook(lambda *call: found.append(call[2].double()))
    everyone = {other: list(range(source.experts.shape.experts)) for other in source.experts.moe_layers}
    with never_chosen(path, model, {**everyone, layer: list(allowed)}):
        logits(model, windows)
    hook.remove()
    return torch.cat(found)


def test_too_many_subsets_are_counted_and_a_sample_is_offered(model_of: Any) -> None:
    source = model_of("olmoe", num_experts=20)
    with pytest.raises(UsageError, match=r"There are 184,756 ways to keep 10 of 20 experts .* --subsets 2000"):
        plan_stage(NAEE, source, NAEE.options_type(calibration="text.txt", experts=10))


def test_a_sample_of_subsets(model_of: Any, reduce: Any) -> None:
    source = model_of("olmoe", num_experts=20)
    output = Path(reduce(source, "naee", experts=10, subsets=5).output)
    offered = subsets(Fewer(20, 10), 5, 0)
    assert len(set(offered)) == 5
    assert all(tuple(experts) in offered for experts in kept(output).values())


def test_subsets_of_groups() -> None:
    fewer = Fewer(8, 4, 2)
    assert subset_count(fewer) == len(set(subsets(fewer, None, 0))) == 36
    assert all(sum(expert < 4 for expert in subset) == 2 for subset in subsets(fewer, None, 0))
    assert set(subsets(fewer, 7, 1)) < set(subsets(fewer, None, 0))
