"""A report with every section, made of invented numbers, as long and as wide as they come."""

from pathlib import Path

from moetool.architectures import ROLES
from moetool.convert.results import Activations
from moetool.job.metering import ExpectedCosts
from moetool.job.result import Keyed, PhaseCost
from moetool.measure.inspected import (
    Analysis,
    Energies,
    Files,
    Inspection,
    LayerAnalysis,
    MaskedLayer,
    Masks,
    ParameterCounts,
    RoleAnalysis,
    Similarity,
)
from moetool.measure.results import Divergence, Evaluation, SynthesisResult
from moetool.report.recorded import RecordedResults, RecordedRun
from moetool.report.results import (
    HowMade,
    MadeStep,
    MergedExperts,
    RareExpert,
    Report,
    StoredExperts,
    StoredRole,
    TextCoverage,
    WeightBytes,
)

LAYERS, EXPERTS = 32, 8
LONG = "/a/very/long/directory/that/has/no/place/to/break/and/goes/on_and_on_and_on_for_ever/" * 2 + "text.txt"
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90)


def whole_report() -> Report:
    """Of a model that cannot be: masks, neurons and stored experts at once."""
    pairs = [[1 - 0.02 * abs(i - j) for j in range(EXPERTS)] for i in range(EXPERTS)]
    similarity = Similarity(pairs, 0.95, 0.86, 0.98)
    energies = Energies(*([round((share / 100) ** power, 4) for share in SHARES] for power in (1, 0.5, 0.25)), [])
    entry = RoleAnalysis(base="stored", sensitivity=1e-7, cka=similarity, cka_v=similarity, cka_u=None, energy=energies)
    layers = [
        LayerAnalysis(layer=layer, sensitivity=3e-7, token_share=None, roles=Keyed(dict.fromkeys(ROLES, entry)))
        for layer in range(0, LAYERS, 4)
    ]
    sites = [MaskedLayer(f"model.layers.{n}.{kind}_proj", "masks", 64, 0.25, 0.7) for n in range(4) for kind in "qkvo"]
    inspection = Inspection(
        path="m", model_type="mixtral", architecture="Mixtral", router_rule="softmax over all experts", layers=LAYERS,
        moe_layers=LAYERS, experts=EXPERTS, top_k=2, hidden_size=4096, intermediate_size=14336, dtype="bfloat16",
        parameters=ParameterCounts(46_700_000_000, 12_900_000_000, 30_000_000_000, 1),
        files=Files(bytes=10**10, original_bytes=3 * 10**10, ratio=0.667, files=3, headers="files", recipe={}),
        moe=Masks(sites, 0.25, 0.7, pairs), analysis=Analysis(shares=SHARES, layers=layers, notes=["A note."]),
    )  # fmt: skip
    against = Divergence(model=LONG, perplexity=5.1, nll=1.63, excess=0.01, excess_error=0.001, kl=0.02, agreement=0.95)
    evaluation = Evaluation(
        model=LONG, data=LONG, perplexity=5.2, nll=1.65, windows=64, tokens=131072, sequence_length=2048, begin=None,
        protocol="perplexity", synthesized="load", synthesis=SynthesisResult(reason="", needed_bytes=0, free_bytes=0),
        batch_rows=1, depends_on_batch=False, against=against,
    )  # fmt: skip
    shares = [[(expert + 1) / 36 for expert in range(EXPERTS)] for _ in range(LAYERS)]
    rare = [RareExpert(layer=layer, expert=0, share=0.001) for layer in range(LAYERS)]
    run = RecordedRun(
        stage="tune", input=LONG, output=LONG, seconds=1234.5, peak_memory_bytes=10**10, scratch_bytes=10**8,
        runs=3, expected=ExpectedCosts(seconds=900.0, peak_memory_bytes=10**10, scratch_bytes=10**9),
        phases=[PhaseCost("Compare with the dense model", 3.5), PhaseCost("Write", 800.0, 10**9, 10**8, 700.0)],
        curve=[{"step": float(step), "loss": 5 / step, "learning_rate": step / 1e6} for step in range(10, 600, 10)],
    )  # fmt: skip
    return Report(
        model=LONG, output="x.html", model_type="mixtral", bytes=10**10, files=3, numbers=30_000_000_000,
        weights=[WeightBytes(kind=f"deltas, quantised-low-rank-{n}", bytes=n * 10**8, before=10**9) for n in range(9)],
        against=LONG,
        made=HowMade(
            steps=[MadeStep(stage="simoe", source=LONG, source_fingerprint="f" * 64)] * 2,
            command=f"moetool compress {LONG} OUTPUT --method d2moe --calibration {LONG} --ratio 0.4",
            preset=f"command: upcycle\noptions:\n  source: {LONG}\n", options={"calibration": LONG, "ratio": 0.4},
            versions={"moetool": "0.1.0"}, calibration={"windows": 128, "tokens": 262_144},
        ),
        inspection=inspection,
        stored=StoredExperts(
            measure="lost_energy",
            roles=[
                StoredRole(
                    layer=layer, role=role, form="5 × 2 bits; 3 × rank 5 … 23 in 3 bits; 12 × rank 900 … 1024",
                    bits=2.5, error=0.01, largest=0.2,
                )
                for layer in range(LAYERS)
                for role in ROLES
            ],
        ),
        merged=[MergedExperts(layer=layer, made_of=[[n, n + 1] for n in range(64)]) for layer in range(LAYERS)],
        coverage=[
            TextCoverage(text=text, layers=range(LAYERS), shares=shares, rare=rare, unreached=0)
            for text in ("calibration", LONG)
        ],
        evaluation=evaluation,
        activations={
            layer: Activations(soft_sparsity=0.1, soft_sparsity_centred=0.2, captured=0.8, captured_by_oracle=0.9)
            for layer in range(LAYERS)
        },
        recorded=RecordedResults(runs=[run], evaluations=[evaluation]),
        notes=[f"A note on {LONG}."],
    )  # fmt: skip


if __name__ == "__main__":  # to look at: python tests/report/whole.py
    from moetool.report.page import write_page

    write_page(whole_report(), Path("whole.html"))
