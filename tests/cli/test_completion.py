"""What the shell offers when the user presses tab."""

import os
import subprocess
import sys

import pytest

from moetool.cli.completion import offered, offered_presets


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
        ("moetool upcycle model out --target qwen2", ["qwen2_moe"]),
        ("moetool compare model --methods hybrid,qu", ["hybrid,quantize"]),
        ("moetool tune model out --preset tune-si", ["tune-simoe"]),
    ],
)
def test_a_shell_is_told(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_names_after_the_last_comma() -> None:
    offer = offered(lambda: ["one", "other", "two"])
    assert offer("o") == ["one", "other"]
    assert offer("two,o") == ["two,one", "two,other"]
    assert offer("x") == []


def test_presets_of_a_method() -> None:
    assert "hybrid-75" in offered_presets("compress", "hybrid")("")
    assert "hybrid-75" not in offered_presets("compress", "d2moe")("")
