from pathlib import Path
from typing import Any

import pytest

from moetool.errors import UsageError
from moetool.job.job import Source
from moetool.job.planning import plan_stage
from moetool.reduce.plan import CountedPlan, possible_counts
from moetool.stages import stages

REAP = stages()["reap"]
GROUPS = {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}


def plan(path: Path, **options: Any) -> Any:
    return plan_stage(REAP, path, REAP.options_type(calibration="text.txt", samples=4, sequence_length=16, **options))


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.3, 0.4])
def test_a_ratio_leaves_as_many_experts_as_it_allows(ratio: float, model_of: Any) -> None:
    source = Source.open(model_of("olmoe"))
    before, sizes = source.checkpoint.weight_bytes, {n: CountedPlan(source, n, 10**9).nbytes for n in range(2, 7)}
    most = max(n for n, size in sizes.items() if size <= (1 - ratio) * before)
    told = plan(model_of("olmoe"), ratio=ratio)
    assert told.details["experts_left"] == most
    assert told.output_bytes == sizes[most]
    over = 1 - sizes[most] / before - ratio
    assert ("note" in told.details) == (over > 0.01)


def test_a_plan_is_as_large_as_the_result(model_of: Any, reduce: Any) -> None:
    for family, experts in (("qwen2_moe", 4), ("granitemoe", 3)):
        source = model_of(family)
        result = reduce(source, "frequency", experts=experts)
        size = sum(file.stat().st_size for file in Path(result.output).glob("*.safetensors"))
        assert plan(source, experts=experts).output_bytes == size == result.sizes.bytes_after


def test_a_ratio_beyond_what_the_router_needs_is_refused_with_the_largest(model_of: Any) -> None:
    with pytest.raises(UsageError, match=r"2 of 6 leave .* at most 0\.\d+\. The router takes 2 of 6"):
        plan(model_of("olmoe"), ratio=0.9)


def test_every_group_keeps_as_many(model_of: Any) -> None:
    path = model_of("deepseek_v3", **GROUPS)
    assert list(possible_counts(Source.open(path))) == [4, 6]
    with pytest.raises(
        UsageError, match=r"--experts 5 of 8: it can be a multiple of 2 from 4 to 6\. .*best 1 of 2 groups"
    ):
        plan(path, experts=5)


@pytest.mark.parametrize("experts", [1, 4, 9])
def test_no_fewer_than_the_router_takes_and_no_more_than_there_are(experts: int, model_of: Any) -> None:
    with pytest.raises(UsageError, match=f"--experts {experts} of 4: it can be 2 to 3. The router takes 2 of 4"):
        plan(model_of("mixtral"), experts=experts)


def test_where_all_are_needed_nothing_can_go(model_of: Any) -> None:
    with pytest.raises(UsageError, match=r"takes 4 of 4 experts for every token\. So there is nothing"):
        plan(model_of("mixtral", num_experts_per_tok=4), ratio=0.2)


def test_a_compressed_model_is_refused(model_of: Any, reduce: Any) -> None:
    compressed = Path(reduce(model_of("mixtral"), "d2moe", ratio=0.2).output)
    with pytest.raises(UsageError, match="is a moetool checkpoint"):
        plan(compressed, experts=2)


@pytest.mark.parametrize(
    ("options", "says"), [({}, "--ratio, --size or --experts"), ({"ratio": 0.2, "experts": 3}, "--ratio and --experts")]
)
def test_a_ratio_or_a_number_is_needed(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        REAP.options_type(**options)
