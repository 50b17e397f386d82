"""What the shell offers when the user presses tab."""

from typing import Any

import pytest

from moetool.cli.completion import offered, offered_presets


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
def test_a_shell_is_told(run_cli: Any, monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]) -> None:
    """Bash asks by these variables, and is answered with a word per line."""
    state = {"_MOETOOL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    for name, value in state.items():
        monkeypatch.setenv(name, value)
    result = run_cli()
    assert result.code == 0, result.stderr
    assert result.stdout.split() == expected


def test_names_after_the_last_comma() -> None:
    offer = offered(lambda: ["one", "other", "two"])
    assert offer("o") == ["one", "other"]
    assert offer("two,o") == ["two,one", "two,other"]
    assert offer("x") == []


def test_presets_of_a_method() -> None:
    assert "hybrid-75" in offered_presets("compress", "hybrid")("")
    assert "hybrid-75" not in offered_presets("compress", "d2moe")("")
