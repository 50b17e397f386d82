from pathlib import Path
from typing import Any

from reduced import kept

GROUPS = {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}


def test_those_with_most_tokens_are_kept(model_of: Any, reduce: Any) -> None:
    result = reduce(model_of("olmoe"), "frequency", experts=3)
    for layer, experts in kept(Path(result.output)).items():
        tokens = result.details.layers[layer].tokens
        assert sum(tokens) == 2 * 8 * 32
        assert sorted(tokens[expert] for expert in experts) == sorted(tokens)[3:]


def test_of_every_group_those_with_most(model_of: Any, reduce: Any) -> None:
    result = reduce(model_of("deepseek_v3", **GROUPS), "frequency", experts=4)
    for layer, experts in kept(Path(result.output)).items():
        tokens = result.details.layers[layer].tokens
        for group in (range(4), range(4, 8)):
            own = [tokens[expert] for expert in experts if expert in group]
            assert sorted(own) == sorted(tokens[group.start : group.stop])[2:]
