"""Several texts, one by one: `eval`, `compare`, `verify --text`, `report` and `routing`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moetool.calibration import readable
from moetool.calibration.bundled import kinds, pieces
from moetool.measure.results import shown_kl

FEW = ("--sequence-length", 32, "--windows", 3)


@pytest.fixture(scope="module")
def texts(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """DATA of a split of the text that `made` is calibrated on, and of another text."""
    folder, content = tmp_path_factory.mktemp("texts"), tiny_text.read_text()
    (folder / "wiki.valid.txt").write_text(content)
    (folder / "wiki.test.txt").write_text(content[200:])
    (folder / "other.txt").write_text(content[::-1])
    return f"{folder}/wiki.test.txt,{folder}/other.txt"


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of every bundled text: a tokenizer of bytes takes seconds for all of it."""
    cut = tuple(piece._replace(text=piece.text[:600]) for piece in pieces())
    monkeypatch.setattr(readable, "pieces", lambda: cut)


@pytest.fixture(scope="module")
def made(run_cli: Any, tiny_mixtral: Path, texts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed model that was calibrated on `wiki.valid.txt`."""
    out = tmp_path_factory.mktemp("made") / "out"
    text = Path(texts.split(",")[0]).with_name("wiki.valid.txt")
    sizes = ("--samples", 8, "--sequence-length", 32, "--ratio", 0.35, "--mix", 0)
    assert run_cli("compress", tiny_mixtral, "--method", "d2moe", out, *sizes, "--calibration", text).code == 0
    return out


def test_each_is_what_it_is_alone(run_cli: Any, tiny_mixtral: Path, made: Path, texts: str) -> None:
    asked = ("eval", made, "--against", tiny_mixtral, *FEW)
    told = run_cli(*asked, "--data", texts, "--json").json
    alone = [run_cli(*asked, "--data", text, "--json").json for text in texts.split(",")]
    assert [text["name"] for text in told["texts"]] == texts.split(",")
    assert [text["own_kind"] for text in told["texts"]] == [True, False]
    assert told["calibration"] == [str(Path(texts.split(",")[0]).with_name("wiki.valid.txt"))]
    for text, found in zip(told["texts"], alone, strict=True):
        assert text == found["texts"][0]
        assert (text["nll"], text["against"], text["windows"]) == (found["nll"], found["against"], 3)
        assert "over_texts" not in found
    assert told["windows"] == 6
    assert told["nll"] == pytest.approx(sum(found["nll"] for found in alone) / 2)
    home, abroad = (found["against"]["kl"] for found in alone)
    assert told["against"]["kl"] == pytest.approx((home + abroad) / 2)
    over = told["over_texts"]
    assert (over["kl_worst"], over["kl_own"]) == (max(home, abroad), home)
    assert over["abroad"] == pytest.approx(abroad / home)
    shown = run_cli(*asked, "--data", texts).stdout
    assert "own kind" in shown
    assert "other kind" in shown
    assert "wiki.valid.txt" in shown
    assert "of other kinds loses more" in run_cli(*asked, "--data", texts.split(",")[0]).stdout


def test_beside_other_models_a_row_says_for_each_which_texts_are_of_its_calibrations_kind(
    run_cli: Any, tiny_mixtral: Path, made: Path, texts: str
) -> None:
    rows = []
    for data in (texts, texts.split(",")[1]):
        shown = run_cli("eval", made, tiny_mixtral, "--data", data, *FEW).stdout
        line = next(line for line in shown.splitlines() if "calibrated on text like" in line)
        rows.append([cell.strip() for cell in line.strip("│").split("│")][3:])
    assert rows == [["wiki.test.txt", ""], ["none of these", ""]]


def test_only_steps_since_the_original_tell_what_is_of_the_calibrations_kind(
    run_cli: Any, tiny_mixtral: Path, texts: str, tmp_path: Path
) -> None:
    """What an earlier step was calibrated on says nothing of what was lost since."""
    names = [Path(text) for text in texts.split(",")]
    few = ("--samples", 8, "--sequence-length", 32, "--mix", 0)
    for source, output, text, *how in (
        (tiny_mixtral, "pruned", names[0], "reap", "--experts", 3),
        (tmp_path / "pruned", "coded", names[1], "quantize", "--bits", 4),
    ):
        made = run_cli("compress", source, tmp_path / output, "--method", *how, *few, "--calibration", text)
        assert made.code == 0, made.stderr
    told = [
        run_cli("eval", tmp_path / "coded", "--data", texts, *FEW, "--json", *against).json
        for against in ((), ("--against", tiny_mixtral), ("--against", tmp_path / "pruned"))
    ]
    kinds_of_both = [[text["own_kind"] for text in found["texts"]] for found in told]
    assert kinds_of_both == [[True, True], [True, True], [False, True]]
    assert [len(found["calibration"]) for found in told] == [2, 2, 1]


@pytest.mark.usefixtures("short_pieces")
def test_what_was_mixed_in_is_its_own_kind(run_cli: Any, tiny_mixtral: Path, texts: str, tmp_path: Path) -> None:
    """Of the bundled text those kinds that gave windows."""
    text, out = Path(texts.split(",")[0]).with_name("wiki.valid.txt"), tmp_path / "out"
    sizes = ("--samples", 2 * len(kinds()) - 2, "--sequence-length", 16)
    made = run_cli(
        "compress", tiny_mixtral, "--method", "d2moe", out, *sizes, "--ratio", 0.35, "--calibration", text, "--json"
    )
    has = [kind for kind in kinds() if made.json["calibration"]["kinds"].get(kind)]
    data = ",".join(f"bundled:{kind}" for kind in kinds())
    told = run_cli("eval", out, "--data", data, "--windows", 1, "--sequence-length", 16, "--json").json
    own = [found["name"].removeprefix("bundled:") for found in told["texts"] if found["own_kind"]]
    assert 0 < len(own) < len(told["texts"])
    assert own == [kind for kind in has if f"bundled:{kind}" in [found["name"] for found in told["texts"]]]


def test_models_beside_one_another(run_cli: Any, tiny_mixtral: Path, made: Path, texts: str) -> None:
    asked = ("eval", tiny_mixtral, made, "--against", tiny_mixtral, "--data", texts, *FEW)
    told = [found["text"] for found in run_cli(*asked, "--json").json["models"]]
    assert [found["over_texts"]["kl_worst"] > 0 for found in told] == [False, True]
    shown = run_cli(*asked).stdout
    for name in ("all texts", "wiki.test.txt", "other.txt", "worst text"):
        assert name in shown


@pytest.mark.usefixtures("short_pieces")
def test_bundled_is_its_kinds(run_cli: Any, tiny_mixtral: Path) -> None:
    few = ("--data", "bundled", "--windows", 1, "--sequence-length", 16, "--json")
    names = [f"bundled:{kind}" for kind in kinds()]
    told = run_cli("eval", tiny_mixtral, *few)
    found = [text["name"] for text in told.json["texts"]]
    assert len(found) > 1
    assert found == [name for name in names if name in found]
    for name in set(names) - set(found):  # said, if this tokenizer cuts it into bytes
        assert name.removeprefix("bundled:") in told.stderr
    routed = run_cli("routing", tiny_mixtral, *few).json
    assert [text["name"] for text in routed["data"]] == found


def test_the_limits_of_verify_hold_for_each(run_cli: Any, tiny_mixtral: Path, made: Path, texts: str) -> None:
    asked = ("verify", made, "--against", tiny_mixtral, "--text", texts, *FEW)
    told = run_cli(*asked, "--json").json["likeness"]
    evaluated = run_cli("eval", made, "--against", tiny_mixtral, "--data", texts, *FEW, "--json").json
    assert told["texts"] == evaluated["texts"]
    assert told["over_texts"] == evaluated["over_texts"]
    worst, mean = told["over_texts"]["kl_worst"], told["over_texts"]["kl_mean"]
    assert worst > mean
    failed = run_cli(*asked, "--max-kl", (worst + mean) / 2)
    assert failed.code == 5
    assert f"KL on {told['over_texts']['worst_text']} is" in failed.stderr
    assert run_cli(*asked, "--max-kl", 1.01 * worst).code == 0
    assert "other.txt" in run_cli(*asked).stdout


def test_compare_has_columns_for_them(run_cli: Any, tiny_mixtral: Path, made: Path, texts: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, chart = tmp_path / "table.md", tmp_path / "chart.svg"
    asked = ("compare", tiny_mixtral, "--models", made, "--data", texts, *FEW, "--work", tmp_path / "work")
    told = run_cli(*asked, "--output", table, "--plot", chart, "--json").json
    evaluated = run_cli("eval", made, "--against", tiny_mixtral, "--data", texts, *FEW, "--json").json
    [row] = told["rows"]
    assert row["texts"] == evaluated["texts"]
    assert row["over_texts"] == evaluated["over_texts"]
    assert [text["name"] for text in told["texts"]] == texts.split(",")
    page = table.read_text()
    assert "| wiki.test.txt (own kind) | other.txt (other kind) |" in page
    for text in row["texts"]:
        assert f"| {shown_kl(text['against']['kl'])} |" in page
    assert chart.stat().st_size > 1000
    assert run_cli(*asked, "--json").json == told  # from what was noted


def test_a_report_says_which_calibration_had(
    run_cli: Any, tiny_mixtral: Path, made: Path, texts: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    asked = ("report", made, page, "--against", tiny_mixtral, "--data", texts, *FEW, "--json")
    told = run_cli(*asked).json["evaluation"]
    written = page.read_text()
    assert "Text by text" in written
    assert "Calibrated on wiki.valid.txt" in written
    assert shown_kl(told["over_texts"]["kl_worst"]) in written


def test_a_refused_config_is_named_and_not_the_tokenizer(
    run_cli: Any, dense: Any, tiny_text: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(dense("llama"), tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "gpt2", "vocab_size": "many"}))
    for command in (("eval", broken, "--data", tiny_text, *FEW), ("generate", broken, "some text")):
        result = run_cli(*command)
        assert result.code == 3
        assert "config.json" in result.stderr
        assert "vocab_size" in result.stderr
        assert "tokenizer" not in result.stderr
