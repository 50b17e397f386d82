"""Results: what is printed of them, in which order, and under which names."""

import json
from dataclasses import dataclass
from typing import get_type_hints

import pytest

from moetool.compress.results import EncodedLayer, LayersResult, RankedLayer, RankedResult
from moetool.convert.results import Activations, ConversionResult, Losses, Parameters, Proof, Shares
from moetool.job.result import CalibrationFacts, Details, Keyed, PhaseTime, Printed, Result, Sizes
from moetool.stages import stages
from moetool.tune.results import Training, TuningResult


def test_fields_at_their_default_are_not_printed() -> None:
    assert CalibrationFacts(4, 256, None).to_json() == {"windows": 4, "tokens": 256, "begin": None}
    assert CalibrationFacts(4, 256, "<s>", 0.0).to_json()["loss"] == 0.0
    assert Details().to_json() == {}


def test_inlined_fields_stand_among_those_around_them() -> None:
    told = LayersResult(calibration=CalibrationFacts(4, 256, None), layers={3: EncodedLayer({"up": [0.5, 0.25]})})
    result = Result(
        stage="quantize-delta",
        input="a",
        output="b",
        sizes=Sizes(10, 4, 0.6),
        seconds=1.5,
        peak_memory_bytes=7,
        phases=[PhaseTime("Write", 1.25)],
        details=told,
    )
    shown = result.to_json()
    assert list(shown) == [
        *("stage", "input", "output", "bytes_before", "bytes_after", "achieved_ratio"),
        *("seconds", "peak_memory_bytes", "phases", "calibration", "layers"),
    ]
    assert shown["phases"] == [{"name": "Write", "seconds": 1.25}]
    assert shown["layers"] == {"3": {"relative_error": {"up": [0.5, 0.25]}}}
    assert json.loads(json.dumps(shown)) == shown


def test_keys_stand_among_the_fields_around_them() -> None:
    @dataclass(frozen=True)
    class Layer(Printed):
        layer: int
        roles: Keyed[str, EncodedLayer]
        said: Keyed[int, str] | None = None
        last: bool = False

    roles = Keyed(up=EncodedLayer({"up": [0.5]}))
    assert list(Layer(3, roles, Keyed({7: "x"}), True).to_json()) == ["layer", "up", "7", "last"]
    assert Layer(3, roles).to_json() == {"layer": 3, "up": {"relative_error": {"up": [0.5]}}}


def test_what_finished_before_says_so() -> None:
    before = Result(
        stage="d2moe",
        input="a",
        output="b",
        status="finished",
        seconds=0.1,
        peak_memory_bytes=7,
        details=Details(),
    )
    assert before.to_json() == {
        "stage": "d2moe",
        "input": "a",
        "output": "b",
        "status": "finished",
        "seconds": 0.1,
        "peak_memory_bytes": 7,
    }


def test_a_ratio_that_was_not_asked_for_is_null() -> None:
    layers = {0: RankedLayer(tokens=[3, 1], lost_energy={})}
    told = RankedResult(ratio=None, unreached_experts=[], depends_on_batch=False, layers=layers)
    assert told.to_json() == {
        "ratio": None,
        "unreached_experts": [],
        "depends_on_batch": False,
        "layers": {"0": {"tokens": [3, 1], "lost_energy": {}}},
    }


def test_a_proof_is_flat() -> None:
    proof = Proof(
        tokens=4, relative_logit_error=1e-7, losses=Losses(2.0, 2.5), routing=Shares(0.1, 0.3, 1.0), preserves=False
    )
    told = ConversionResult(target="mixtral", parameters=Parameters(9, 5, 4), proof=proof, notes=["mind"])
    assert told.to_json() == {
        "target": "mixtral",
        "parameters": {"total": 9, "active": 5, "added": 4},
        "proof": {
            "tokens": 4,
            "relative_logit_error": 1e-7,
            "loss_dense": 2.0,
            "loss_mixture": 2.5,
            "least_expert_share": 0.1,
            "largest_expert_share": 0.3,
            "router_entropy": 1.0,
            "preserves": False,
        },
        "notes": ["mind"],
    }


def test_what_training_says_stands_beside_the_examples() -> None:
    told = TuningResult(
        examples=3,
        truncated=0,
        left_out=0,
        answer_tokens=9,
        begin=None,
        trained_parameters=100,
        training=Training(steps=2, training_seconds=0.5, mask_sparsity=0.75, multiplier=0.0),
    )
    assert list(told.to_json()) == [
        *("examples", "truncated", "left_out", "answer_tokens", "begin", "trained_parameters"),
        *("steps", "training_seconds", "mask_sparsity", "multiplier"),
    ]


def test_activations_are_means_over_layers() -> None:
    layers = [
        Activations(soft_sparsity=0.25, soft_sparsity_centred=0.5, captured=0.9),
        Activations(soft_sparsity=0.75, soft_sparsity_centred=0.0, captured=0.6),
    ]
    assert Activations.mean(layers) == Activations(soft_sparsity=0.5, soft_sparsity_centred=0.25, captured=0.75)


def test_what_json_has_no_word_for_is_refused() -> None:
    @dataclass(frozen=True)
    class Odd(Printed):
        what: object

    with pytest.raises(TypeError, match="JSON has no set"):
        Odd({1}).to_json()


@pytest.mark.parametrize("name", list(stages()))
def test_every_stage_says_what_it_tells(name: str) -> None:
    kind = stages()[name]
    told = get_type_hints(kind.run)["return"]
    assert issubclass(told, Details)
    assert told.__dataclass_params__.frozen
