"""What `moetool bench` says of ratios that are not those of the medians above them."""

from moetool.cli.commands.bench import explained_ratios
from moetool.measure.bench.result import Case, CaseRatios


def _case(length: int, prefill: float, decode: float | None) -> Case:
    return Case(
        batch=1,
        length=length,
        prefill_seconds=length / prefill,
        prefill_tokens_per_second=prefill,
        decode_tokens_per_second=decode,
        flops=1,
    )


def _ratios(length: int, prefill: float, decode: float | None) -> CaseRatios:
    return CaseRatios(
        batch=1, length=length, prefill_tokens_per_second=prefill, decode_tokens_per_second=decode, flops=1.0
    )


def test_medians_of_ratios_and_ratios_of_medians() -> None:
    """702.7 beside 1,273.2 tokens per second, and .757 below: that is explained."""
    model, original = [_case(128, 900, 50), _case(512, 702.7, 60)], [_case(128, 1000, 40), _case(512, 1273.2, 50)]
    said = explained_ratios(model, original, [_ratios(128, 0.91, 1.2), _ratios(512, 0.757, 1.2)])
    assert said.startswith("A ratio of speeds is the median over rounds,")
    assert "The two differ most in prefill of 1 × 512 tokens: 0.757 and 0.552. Some rounds were slowed" in said


def test_where_the_two_agree_no_case_is_named() -> None:
    said = explained_ratios([_case(8, 100, None)], [_case(8, 50, None)], [_ratios(8, 2.04, None)])
    assert said.endswith("it is not the ratio of the two medians above it.")
