"""`scripts/benchmarks/defaults.py`: the default beside named methods, from the comparison to the printed table."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch, run_cli: Any) -> Any:
    """The script, with few methods, whose commands run in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("defaults")
    monkeypatch.setattr(script, "moetool", lambda *words: json.loads(run_cli(*words, "--json").stdout))
    return script


@pytest.mark.parametrize("texts", sampled([1, 2], [2]))
def test_every_row_is_over_the_default_of_its_bytes(defaults, monkeypatch, tiny_mixtral, tiny_text, tmp_path, texts):
    """From the command line to the file, with a ratio that no method reaches: its rows are left out."""
    data = [tiny_text, tmp_path / "other.txt"][:texts]
    (tmp_path / "other.txt").write_text("Something else. " * 200)
    output = tmp_path / "table.md"
    words = ["defaults.py", tiny_mixtral, "--data", ",".join(map(str, data)), "--ratios", 0.5, 0.99]
    words += ["--methods", "quantize", "quantize --scheme layer=quantize", "--bits", 4]
    words += ["--samples", 4, "--windows", 4, "--sequence-length", 32, "--work", tmp_path / "work", "--output", output]
    monkeypatch.setattr("sys.argv", [*map(str, words)])
    defaults.main()
    rows = [line.strip("| ").split(" | ") for line in output.read_text().splitlines() if line.startswith("|")]
    columns, rows = rows[0], rows[2:]
    assert len(columns) == 1 + 2 * texts  # the first has no name
    assert [row[0] for row in rows] == [
        *("**default**", "`quantize`", "`quantize --scheme layer`"),
        *("**default**", "`ders-quantize --bits 4`"),
    ]


def row(name: str, kl: float | None, asked: float | None = 0.5, *others: float) -> dict[str, Any]:
    """A row as `moetool compare --json` has it; one without `kl` is of a model that could not be made."""
    if kl is None:
        return {"name": name, "asked": asked, "error": "impossible"}
    texts = [{"against": {"kl": own, "agreement": 0.9}} for own in (kl, *others)]
    return {"name": name, "asked": asked, "saved": 0.5, "kl": kl, "texts": texts}


def test_ratios_are_the_default_over_each_row(defaults):
    rows = [row("default", 0.003, 0.5, 0.0002), row("hybrid", 0.002, 0.5, 0.004), row("d2moe", None)]
    first, second = list(defaults.table(rows, ["home.txt", "other.txt"]))[2:]
    assert first == "| **default** | 50.00% | 3.000, 90.0% | 0.200, 90.0% |  |  |"
    assert second == "| `hybrid` | 50.00% | 2.000, 90.0% | 4.000, 90.0% | **1.50** | 0.05 |"


def test_a_ratio_without_the_default_has_no_rows(defaults):
    """Nothing is compared with a default that could not be made."""
    assert not list(defaults.groups([row("default", None), row("hybrid", 0.002)]))


def test_losses_of_next_to_nothing_are_not_compared(defaults):
    assert defaults.ratio(0.004, 0.001) == "–"
    assert defaults.ratio(0.02, 0.0) != "–"
