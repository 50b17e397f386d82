"""`moetool report`: for every kind of model the sections that apply, with the numbers of other commands."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copy_of
from html_pages import Page, check_page

from moetool.checkpoint.sizes import format_bytes
from moetool.errors import ResourceError
from moetool.measure.tasks.results import saved_beside

MADE = ["How it was made", "Size"]
LAST = ("Time, memory and scratch", "Options and versions")
SIMOE = ("--method", "simoe", "--experts", 4, "--router-width", 8, "--sparsity", 0.5)
PERPLEXITY = "Perplexity; excess and KL in thousandths of a nat per token"
WINDOWS = ("--sequence-length", 32, "--windows", 4)


@pytest.fixture(scope="module")
def models(tiny_mixtral: Path, compress: Any, upcycle: Any, moefy: Any, dense: Any) -> dict[str, Path]:
    llama = dense("llama")
    return {
        "dense": llama,
        "moe": tiny_mixtral,
        "d2moe": compress(tiny_mixtral, "--ratio", 0.35).path,
        "hybrid": compress(tiny_mixtral, "--method", "hybrid", "--ratio", 0.6, "--group-size", 16).path,
        "reap": compress(tiny_mixtral, "--method", "reap", "--ratio", 0.25).path,
        "simoe": upcycle(llama, *SIMOE).path,
        "moefied": moefy(llama, "--experts", 4, "--keep", 0.5).path,
    }


def reported(run_cli: Any, model: Path, output: Path, *options: object) -> tuple[Page, dict[str, Any]]:
    """The page, and the numbers behind it."""
    result = run_cli("report", model, output, *options, "--json")
    assert result.code == 0, result.stderr
    return check_page(output.read_text()), result.json


def reported_text(run_cli: Any, model: Path, folder: Path) -> str:
    reported(run_cli, model, folder / "a.html")
    return (folder / "a.html").read_text()


@pytest.mark.parametrize(
    ("kind", "headings"),
    [
        ("dense", ["Size"]),
        ("moe", ["Size"]),
        ("d2moe", [*MADE, "Experts as stored", "Routing and coverage", *LAST]),
        ("hybrid", [*MADE, "Experts as stored", "Routing and coverage", *LAST]),
        ("reap", [*MADE, "Experts left", *LAST]),
        ("simoe", [*MADE, "Quality", "Where experts landed", *LAST]),
        ("moefied", [*MADE, "Quality", "Neurons as experts", *LAST]),
    ],
)
def test_sections_are_those_that_apply(run_cli, models, tmp_path, kind, headings):
    page, told = reported(run_cli, models[kind], tmp_path / "a.html")
    assert page.headings == headings
    first = (tmp_path / "a.html").read_bytes()
    assert told["output"] == str(tmp_path / "a.html")
    reported(run_cli, models[kind], tmp_path / "a.html")
    assert (tmp_path / "a.html").read_bytes() == first
    files = sum(file.stat().st_size for file in models[kind].glob("*.safetensors"))
    assert told["bytes"] == files
    assert 0.8 * files < sum(each["bytes"] for each in told["weights"]) < files  # the rest are headers
    if kind != "dense":
        inspected = run_cli("inspect", models[kind], "--json").json
        assert told["inspection"] == {name: inspected[name] for name in inspected if name != "schema_version"}


def test_numbers_are_those_of_the_manifest(run_cli, models, tmp_path):
    page, told = reported(run_cli, models["d2moe"], tmp_path / "a.html")
    layers = json.loads((models["d2moe"] / "moetool.json").read_text())["layers"]
    shares = dict(zip(told["coverage"][0]["layers"], told["coverage"][0]["shares"], strict=True))
    rows = {(row[0], row[1]): row for row in page.rows("By layer and role")}
    assert len(rows) == 9
    for layer, said in layers.items():
        for role, lost in said["lost_energy"].items():
            assert float(rows[layer, role][4]) == pytest.approx(sum(lost) / len(lost), rel=1e-3)
            assert float(rows[layer, role][5]) == pytest.approx(max(lost), rel=1e-3)
        assert shares[int(layer)] == pytest.approx([count / sum(said["tokens"]) for count in said["tokens"]], abs=1e-6)
    bits = [each["bits"] for each in told["stored"]["roles"]]
    experts = sum(each["bytes"] for each in told["weights"] if each["kind"].startswith(("experts", "deltas", "bases")))
    assert sum(bits) / 8 * 4 * 32 * 48 == pytest.approx(experts, rel=1e-3)
    assert [row[0] for row in page.rows("Bytes by kind of tensor")] == [each["kind"] for each in told["weights"]]


def test_measured_numbers_are_those_of_other_commands(run_cli, models, tiny_mixtral, tiny_text, tmp_path):
    options = ("--data", tiny_text, *WINDOWS)
    page, told = reported(
        run_cli, models["d2moe"], tmp_path / "a.html", "--against", tiny_mixtral, "--analysis", *options
    )
    aside = ("--output", tmp_path / "aside.json")
    evaluated = run_cli("eval", models["d2moe"], *options, "--against", tiny_mixtral, *aside, "--json").json
    routed = run_cli("routing", models["d2moe"], *options, "--json").json
    analysed = run_cli("inspect", models["d2moe"], "--analysis", "--json").json["analysis"]
    for found in (evaluated, routed):
        del found["schema_version"]
        found.get("synthesis", {}).pop("free_bytes", None)
    del told["evaluation"]["synthesis"]["free_bytes"]
    assert told["evaluation"] == evaluated
    assert told["routing"] == routed
    assert told["inspection"]["analysis"] == analysed
    assert told["coverage"][1]["shares"] == routed["data"][0]["shares"]
    assert page.rows(PERPLEXITY)[0][1] == f"{evaluated['perplexity']:.4f}"
    assert page.headings[3:8] == [
        *("Experts as stored", "Energy of singular values", "Similarity of experts", "Sensitivity"),
        "Routing and coverage",
    ]
    before = {each["kind"]: each["before"] for each in told["weights"]}
    assert before["experts"] == 3 * 4 * 3 * 32 * 48 * 4
    assert before["deltas, low-rank"] == 0
    said = set(re.findall(r"([\d.]+ [kM]B) before|Before: [^<]*, ([\d.]+ [kM]B)", (tmp_path / "a.html").read_text()))
    original = format_bytes(sum(file.stat().st_size for file in tiny_mixtral.glob("*.safetensors")))
    assert said == {(original, ""), ("", original)}


def test_what_simoe_and_neurons_say(run_cli, models, tmp_path):
    page, told = reported(run_cli, models["simoe"], tmp_path / "a.html")
    assert page.drawn == 5  # two of them of time and memory
    assert len(page.rows("Open channels")) == 3 + 7  # layers, and kinds of linear layers
    masks = next(each["bytes"] for each in told["weights"] if each["kind"] == "masks")
    assert masks == 4 * 4 * sum(site["channels"] for site in told["inspection"]["moe"])
    page, told = reported(run_cli, models["moefied"], tmp_path / "b.html")
    said = json.loads((models["moefied"] / "moetool.json").read_text())["layers"]
    assert told["activations"] == said
    assert [row[1] for row in page.rows("By layer")] == [f"{each['captured']:.1%}" for each in said.values()]


def test_the_command_makes_it_again(run_cli, models, tmp_path):
    """The same files, from the words of the page."""
    for kind in ("d2moe", "simoe"):
        _, told = reported(run_cli, models[kind], tmp_path / "a.html")
        words = shlex.split(told["made"]["command"])
        assert words[0] == "moetool"
        again = tmp_path / kind
        result = run_cli(*(str(again) if word == "OUTPUT" else word for word in words[1:]))
        assert result.code == 0, result.stderr
        assert (again / "moetool.json").read_bytes() == (models[kind] / "moetool.json").read_bytes()


def test_results_of_other_commands(run_cli, compress, tiny_mixtral, tiny_text, tmp_path):
    made = compress(tiny_mixtral, "--ratio", 0.35)
    (tmp_path / "run.json").write_text(json.dumps(made.told))
    short = tmp_path / "short.txt"
    short.write_text(tiny_text.read_text()[:3000])
    tuned = run_cli(
        "tune", tiny_mixtral, tmp_path / "tuned", "--data", short, "--eval-data", short,
        *("--steps", 4, "--log-every", 2, "--sequence-length", 32, "--json"),
    )  # fmt: skip
    assert tuned.code == 0, tuned.stderr
    (tmp_path / "tune.json").write_text(tuned.stdout)
    results = f"{tmp_path}/run.json,{tmp_path}/tune.json"
    page, told = reported(run_cli, made.path, tmp_path / "a.html", "--results", results)
    assert page.headings[-3:] == ["Training", *LAST]
    curve = tuned.json["curve"]
    assert [point["step"] for point in curve if "loss" in point] == [1, 2, 4]
    assert curve[-1]["eval_loss"] == pytest.approx(tuned.json["eval_loss"], abs=1e-5)
    assert told["recorded"]["runs"][1]["curve"] == curve
    phases = made.told["phases"]
    assert {"Forward", "Backward"} <= {phase["name"] for phase in phases}
    assert 0 < sum(phase["seconds"] for phase in phases) <= made.told["seconds"] + 0.1
    rows = [row for row in page.rows("Phases") if row[1] != "the rest"]
    assert len(rows) == len(phases) + len(tuned.json["phases"])


def test_every_job_on_the_way_has_kept_what_it_cost(run_cli, compress, tiny_mixtral, tiny_text, tmp_path):
    """Without what the commands printed: the curve of a training, and phases of that and of what came after."""
    tuned, made = tmp_path / "tuned", tmp_path / "made"
    steps = ("--data", tiny_text, "--steps", 4, "--log-every", 2, "--sequence-length", 32)
    assert run_cli("tune", tiny_mixtral, tuned, *steps).code == 0
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 2, "--sequence-length", 32)
    compressed = run_cli("compress", tuned, "--method", "d2moe", made, "--ratio", 0.35, *text, "--json")
    assert compressed.code == 0, compressed.stderr
    page, told = reported(run_cli, made, tmp_path / "a.html")
    first, last = told["jobs"]
    assert [(each["stage"], each["input"], each["output"]) for each in (first, last)] == [
        ("tune", str(tiny_mixtral), str(tuned)),
        ("d2moe", str(tuned), str(made)),
    ]
    assert [point["step"] for point in first["curve"] if "loss" in point] == [1, 2, 4]
    assert page.headings[-3:] == ["Training", *LAST]
    printed = compressed.json["phases"]
    assert [each["name"] for each in last["phases"]] == [each["name"] for each in printed]
    assert [each["seconds"] for each in last["phases"]] == [each["seconds"] for each in printed]
    assert max(each["scratch_bytes"] for each in last["phases"]) == last["scratch_bytes"] > 0
    assert max(each["peak_memory_bytes"] for each in last["phases"]) <= last["peak_memory_bytes"]
    plan = run_cli(
        "compress", tuned, "--method", "d2moe", tmp_path / "x", "--ratio", 0.35, *text, "--dry-run", "--json"
    ).json
    assert last["expected"] == {
        name: plan[name] for name in ("seconds", "peak_memory_bytes", "scratch_bytes") if name in last["expected"]
    }
    assert len(page.rows("Phases")) == len(first["phases"]) + len(last["phases"]) + 2
    assert sum(float(row[2]) for row in page.rows("Phases") if row[0] == "d2moe") == pytest.approx(
        last["seconds"], abs=0.5
    )


def test_what_eval_has_measured_is_on_the_page(run_cli, models, tiny_mixtral, tiny_text, tmp_path):
    model = copy_of(models["d2moe"], tmp_path / "small")
    assert "not measured" in reported_text(run_cli, model, tmp_path)
    against = ("eval", model, "--data", tiny_text, *WINDOWS, "--against", tiny_mixtral)
    evaluated = run_cli(*against, "--json").json
    for again in (against, ("eval", tiny_mixtral, *against[2:])):  # saved already; not made by moetool
        assert run_cli(*again).code == 0
    assert run_cli(*against[:-2]).code == 0  # the loss alone is another measurement, but not the headline
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["small.eval-2.json", "small.eval.json"]
    assert not list(tiny_mixtral.parent.glob("*.eval.json"))
    assert "not measured" not in reported_text(run_cli, model, tmp_path)
    page, told = reported(run_cli, model, tmp_path / "a.html")
    saved, alone = told["saved"]
    assert saved["against"] == evaluated["against"]
    assert "against" not in alone
    assert [row[2] != "–" for row in page.rows(PERPLEXITY)] == [True, False]
    given = ("--results", tmp_path / "small.eval.json")
    assert len(reported(run_cli, model, tmp_path / "a.html", *given)[0].rows(PERPLEXITY)) == 2
    assert run_cli("verify", model).code == 0


def test_a_measurement_is_saved_once_however_its_model_and_texts_are_named(
    run_cli, models, tiny_mixtral, tiny_text, tmp_path, monkeypatch
):
    copy_of(models["d2moe"], tmp_path / "small")
    shutil.copy(tiny_text, tmp_path / "held-out.txt")
    monkeypatch.chdir(tmp_path)
    for model, text in (("small", "held-out.txt"), ("./small", "./held-out.txt"), (tmp_path / "small", "held-out.txt")):
        assert run_cli("eval", model, "--data", text, *WINDOWS, "--against", tiny_mixtral).code == 0
    assert [file.name for file in tmp_path.glob("*.json")] == ["small.eval.json"]


def test_results_of_a_model_with_a_longer_name_are_its_own(run_cli, models, tiny_text, tmp_path):
    """`small.eval-old.eval.json` is of a model called `small.eval-old`."""
    model = copy_of(models["d2moe"], tmp_path / "small")
    for other in ("small.eval-old", "small.eval-1", "small.evaluated"):
        (tmp_path / f"{other}.json").write_text("{")
        (tmp_path / f"{other}.eval.json").write_text("{")
    for number in (3, 10):
        (tmp_path / f"small.eval-{number}.json").write_text("{")
    assert [file.name for file in saved_beside(str(model))] == ["small.eval-3.json", "small.eval-10.json"]
    _, told = reported(run_cli, model, tmp_path / "a.html")
    assert not [note for note in told.get("notes", ()) if "old" in note or "evaluated" in note or "-1." in note]


def test_what_eval_has_measured_of_other_weights_is_left_out(run_cli, models, tiny_text, tmp_path):
    model = copy_of(models["d2moe"], tmp_path / "small")
    assert run_cli("eval", model, "--data", tiny_text, *WINDOWS).code == 0
    shutil.rmtree(model)
    copy_of(models["hybrid"], model)
    (tmp_path / "small.eval-2.json").write_text("{")
    named = tmp_path / "small.eval-3.json"
    assert run_cli("eval", model, "--data", tiny_text, *WINDOWS, "--output", named).code == 0
    _, told = reported(run_cli, model, tmp_path / "a.html")
    assert "saved" not in told
    assert told["notes"][0].startswith("small.eval.json is left out")
    assert "small.eval-2.json is not valid JSON" in told["notes"][1]
    assert told["notes"][2].startswith("small.eval-3.json is left out: it does not say on which weights")
    assert len(reported(run_cli, model, tmp_path / "a.html", "--results", named)[0].rows(PERPLEXITY)) == 1


def test_what_is_missing_or_damaged_is_said_before_anything_is_measured(run_cli, models, tiny_text, tmp_path):
    model = copy_of(models["d2moe"], tmp_path / "small")
    (model / "moetool.json").unlink()
    _, told = reported(run_cli, model, tmp_path / "a.html")
    assert told["notes"][0] == "moetool.json is missing: nothing says how this model was made."
    (model / "moetool.json").write_text("{")
    result = run_cli("eval", model, "--data", tiny_text, *WINDOWS)
    assert result.code == 3
    assert "moetool.json is not valid JSON" in result.stderr
    assert "Evaluate" not in result.stderr
    result = run_cli("eval", models["d2moe"], models["d2moe"], "--data", tiny_text, *WINDOWS)
    assert result.code == 2
    assert f"{models['d2moe']} is named twice" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"), [(b"[1]", "holds a JSON list"), (b"\xff", "is not valid JSON"), (None, "There is no file")]
)
def test_results_that_cannot_be_read_are_named_with_their_option(run_cli, models, tmp_path, content, said):
    file = tmp_path / "x.json"
    if content is not None:
        file.write_bytes(content)
    result = run_cli("report", models["d2moe"], tmp_path / "a.html", "--results", file)
    assert result.code == 3
    assert result.stderr.startswith("error: --results: ")
    assert said in result.stderr


def test_a_folder_in_which_nobody_may_write_stops_no_evaluation(run_cli, models, tiny_text, monkeypatch):
    def refused(*_: object) -> None:
        raise ResourceError("The disk is full.")

    monkeypatch.setattr("moetool.cli.commands.evaluate.write_json", refused)
    result = run_cli("eval", models["moefied"], "--data", tiny_text, *WINDOWS)
    assert result.code == 0
    assert "The result was not saved. The disk is full." in result.stderr


def test_estimated_losses_are_shares(run_cli, models, tmp_path):
    page, told = reported(run_cli, models["hybrid"], tmp_path / "a.html")
    assert told["stored"]["measure"] == "loss"
    shares = [float(row[4]) for row in page.rows("By layer and role")]
    losses = [each["error"] for each in told["stored"]["roles"]]
    assert shares == pytest.approx([100 * loss / sum(losses) for loss in losses], rel=1e-3)
    assert "share of all experts&#39; estimated loss, %" in (tmp_path / "a.html").read_text()
    assert "means over the experts" not in (tmp_path / "a.html").read_text()


def test_a_hostile_name_is_text(run_cli, models, tmp_path):
    model = copy_of(models["simoe"], tmp_path / "<script>alert(1)<" / "b>$x$")
    page, told = reported(run_cli, model, tmp_path / "a.html")
    assert told["model"] == str(model)
    assert "script" not in page.tags
    assert "<script" not in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (["--layers", "0"], 2, "--analysis"),
        (["x.svg"], 2, ".html"),
        (["--results", "absent.json"], 3, "absent.json"),
    ],
)
def test_what_is_refused(run_cli, models, tmp_path, monkeypatch, options, code, problem):
    monkeypatch.chdir(tmp_path)
    result = run_cli("report", models["moe"], *options)
    assert (result.code, list(tmp_path.iterdir())) == (code, [])
    assert problem in result.stderr


def test_analysis_of_what_has_no_experts_is_left_out(run_cli, models, tmp_path):
    page, told = reported(run_cli, models["dense"], tmp_path / "a.html", "--analysis")
    assert page.headings == ["Size"]
    assert "no experts" in told["notes"][0]
