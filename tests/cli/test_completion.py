"""What the shell offers when the user presses tab."""

import os
import subprocess
import sys

import pytest

from moetool.cli.completion import offered, offered_for, offered_presets


def completed(line: str) -> list[str]:
    """What bash is told for a command line."""
    state = {"_MOETOOL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'moetool'; from moetool.cli import main; main()"]
    run = subprocess.run(command, env=os.environ | state, capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moetool mo", ["moefy"]),
        ("moetool compress model out --method d", ["d2moe", "ders-quantize", "ders-sparsify"]),
        ("moetool compress --method hybrid --preset hybrid-7", ["hybrid-70", "hybrid-75", "hybrid-75-best"]),
        ("moetool compress --method ders-quantize --base-b", ["--base-bits"]),
    ],
)
def test_a_shell_is_told(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_names_after_the_last_comma() -> None:
    offer = offered(lambda: ["one", "other", "two"])
    assert offer("o") == ["one", "other"]
    assert offer("two,o") == ["two,one", "two,other"]
    assert offer("x") == []


def test_families_methods_and_presets() -> None:
    targets, methods = offered_for("target"), offered_for("methods")
    assert targets is not None
    assert methods is not None
    assert "qwen2_moe" in targets("qwen")
    assert "quantize" in methods("hybrid,q")[0]
    assert offered_for("ratio") is None
    assert "tune-simoe" in offered_presets("tune", None)("")
