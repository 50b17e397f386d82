"""docs/walkthrough.ipynb, run cell by cell on models that were hardly trained."""

import json
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
from pages import ROOT

NOTEBOOK = json.loads((ROOT / "docs/walkthrough.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.exhaustive
def test_every_cell_runs(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python as it stands, and commands of %%bash, but for fewer steps of training."""
    display = types.ModuleType("IPython.display")
    display.SVG = lambda filename: Path(filename).read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in CELLS:
        cell = re.sub(r"(steps[= ])\d+", r"\g<1>2", cell)
        if cell.startswith("%%bash\n"):
            program, *words = shlex.split(
                cell.removeprefix("%%bash\n").replace("\\\n", " ").replace("2> /dev/null", "")
            )
            assert program == "moetool"
            done = run_cli(*words)
            assert done.code == 0, f"{cell}\n{done.stderr}"
        else:
            exec(cell, names)
    assert (tmp_path / "walkthrough/sizes.svg").is_file()


def test_its_outputs_are_there() -> None:
    """It was run from top to bottom before it was committed."""
    counts = [cell["execution_count"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert "KL" in json.dumps([cell.get("outputs") for cell in NOTEBOOK["cells"]])
