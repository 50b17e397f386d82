"""What other commands had printed, read back."""

import json
import math
from pathlib import Path

import pytest

from moetool.checkpoint.manifest import Manifest, Origin
from moetool.checkpoint.names import COSTS
from moetool.checkpoint.sealed import write_sealed
from moetool.cli.display import print_json
from moetool.errors import InvalidInputError
from moetool.measure.results import Evaluation, SynthesisResult, TextLoss
from moetool.report.recorded import read_recorded, without_costs

RUN = {"schema_version": 1, "stage": "tune", "input": "a", "output": "b", "seconds": 2.5, "peak_memory_bytes": 7}


def test_results_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "examples": 3, "curve": [{"step": 1, "loss": 2}]}))
    text = {"name": "t", "tokens": 9, "shares": [[0.25, 0.75]], "components": [[0, 0]]}
    told = {"model": "m", "begin": None, "data": [text], "depends_on_batch": False}
    (tmp_path / "routing.json").write_text(json.dumps(told))
    found = read_recorded([f"{tmp_path}/run.json", f"{tmp_path}/routing.json"])
    assert [(run.stage, run.seconds, run.curve) for run in found.runs] == [("tune", 2.5, [{"step": 1, "loss": 2}])]
    assert found.routings[0].data[0].shares == [[0.25, 0.75]]
    assert found.evaluations == []


def test_an_infinite_perplexity_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a broken model; JSON has no number for it."""
    synthesis = SynthesisResult(reason="", needed_bytes=0, free_bytes=0)
    found = Evaluation(
        model="m", protocol="perplexity", data="t", perplexity=math.inf, nll=800.0, windows=1, tokens=9,
        sequence_length=9, begin=None, batch_rows=1, depends_on_batch=False, synthesized="load", synthesis=synthesis,
        texts=[TextLoss(name="t", perplexity=math.inf, nll=800.0, windows=1, tokens=9)],
    )  # fmt: skip
    print_json(found.to_json())
    (tmp_path / "eval.json").write_text(capsys.readouterr().out)
    assert read_recorded([str(tmp_path / "eval.json")]).evaluations == [found]


def test_evaluations_of_several_models(tmp_path: Path) -> None:
    """Each by itself; of one that only answered tasks there is nothing."""
    synthesis = {"reason": "", "needed_bytes": 0, "free_bytes": 0}
    text = {"data": "t", "perplexity": 2.0, "nll": 0.7, "windows": 1, "tokens": 9, "sequence_length": 9, "begin": None}
    how = {"protocol": "perplexity", "synthesized": "load", "synthesis": synthesis, "batch_rows": 1, "texts": []}
    texts = [{"model": name, "depends_on_batch": False, **text, **how} for name in "ab"]
    told = [{"model": own["model"], "fingerprint": "", "text": own} for own in texts]
    answered = {"model": "c", "fingerprint": "", "tasks": {"scores": []}}
    (tmp_path / "eval.json").write_text(json.dumps({"schema_version": 1, "models": [*told, answered]}))
    assert [found.model for found in read_recorded([str(tmp_path / "eval.json")]).evaluations] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"stage": "tune"}', "this is not what"),
        ("[]", "not an object"),
        ("{", "not valid JSON"),
        (json.dumps({**RUN, "seconds": "long"}), "seconds"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InvalidInputError, match=problem):
        read_recorded([str(tmp_path / "x.json")])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--results: There is no file"):
        read_recorded([str(tmp_path / "x.json")])


UPCYCLED = Origin(stage="vanilla", source="dense", source_fingerprint="")
MADE = Manifest(source="up", source_fingerprint="", recipe={"stage": "d2moe"}, seed=0, lineage=(UPCYCLED,))


def test_whatever_keeps_costs_from_being_told_is_said(tmp_path: Path) -> None:
    (tmp_path / COSTS).parent.mkdir()
    assert without_costs(tmp_path, None) is None
    assert "is not there" in str(without_costs(tmp_path, MADE))
    (tmp_path / COSTS).write_text("{}")
    assert "digest" in str(without_costs(tmp_path, MADE))
    write_sealed(tmp_path / COSTS, {"format_version": 99, "jobs": []})
    assert "format version 99" in str(without_costs(tmp_path, MADE))
    write_sealed(tmp_path / COSTS, {"format_version": 1, "jobs": [RUN]})
    assert "first 1 of the 2 jobs" in str(without_costs(tmp_path, MADE))
    write_sealed(tmp_path / COSTS, {"format_version": 1, "jobs": [RUN, RUN]})
    assert without_costs(tmp_path, MADE) is None
