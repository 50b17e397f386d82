"""Names that no file system takes: a sentence with 2 for what is to be written, 3 for what is to be read."""

from pathlib import Path
from typing import Any

import pytest

from moetool.errors import InvalidInputError, explained

TOO_LONG = "x" * 300
STRAY = b"caf\xe9".decode(errors="surrogateescape")  # is not UTF-8
NAMES = {"too long": TOO_LONG, "deep": "y/" * 3000, "nobody": "~nobody-of-that-name/x", "nul": "a\0b", "stray": STRAY}


@pytest.mark.parametrize("name", NAMES)
def test_an_output(run_cli: Any, tiny_mixtral: Path, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--resume",), ("--overwrite",)):
        result = run_cli("decompose", tiny_mixtral, NAMES[name], *more)
        assert result.code == 2, result.stderr
        assert "Traceback" not in result.stderr
        assert len(result.stderr) < 300
    assert not list(tmp_path.iterdir())


def test_an_output_that_begins_with_a_dash_is_no_option_of_the_next_command(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_cli("decompose", tiny_mixtral, "./-out")
    assert result.code == 0, result.stderr
    assert "quantize-delta ./-out ./-out-4bit" in result.stderr


def test_an_output_in_a_folder_that_is_a_file(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file/out", "file/deep/out", "file"):
        result = run_cli("decompose", tiny_mixtral, tmp_path / name)
        assert result.code == 2
        assert "not a directory" in result.stderr
    result = run_cli("decompose", tiny_mixtral, tmp_path / "new" / TOO_LONG)
    assert result.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["loop", "dangling", "loop/out", "dangling/out"])
def test_an_output_at_a_link_that_leads_nowhere(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    result = run_cli("decompose", tiny_mixtral, tmp_path / name)
    assert result.code == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "loop"]


@pytest.mark.parametrize("name", NAMES)
def test_an_input(run_cli: Any, tiny_mixtral: Path, name: str, tmp_path: Path) -> None:
    reading = {
        "inspect": ("inspect", NAMES[name]),
        "verify": ("verify", NAMES[name]),
        "against": ("verify", tiny_mixtral, "--against", NAMES[name]),
        "decompose": ("decompose", NAMES[name], tmp_path / "out"),
        "base": ("decompose", tiny_mixtral, tmp_path / "out", "--base", NAMES[name]),
        "text": ("eval", tiny_mixtral, "--data", NAMES[name]),
        "calibration": (
            "compress",
            tiny_mixtral,
            "--method",
            "d2moe",
            tmp_path / "out",
            "--ratio",
            0.3,
            "--calibration",
            NAMES[name],
        ),
        "tune": ("tune", tiny_mixtral, tmp_path / "out", "--data", NAMES[name]),
    }
    for what, arguments in reading.items():
        result = run_cli(*arguments)
        assert result.code in (2, 3), (what, result.stderr)
        assert "Traceback" not in result.stderr, what
        assert result.stderr.startswith("error: "), (what, result.stderr)
    assert not list(tmp_path.iterdir())


def test_what_the_system_refuses_is_said() -> None:
    """A directory that may not be read: root may, so it cannot be tried here."""
    found = explained(PermissionError(13, "Permission denied", "/secret"))
    assert isinstance(found, InvalidInputError)
    assert str(found) == "Cannot use /secret: Permission denied."
    assert explained(ValueError("a bug")) is None
    assert explained(OSError("no number, no name")) is None


def test_a_picture_is_refused_before_the_work(run_cli: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, words in (("nowhere/a.png", "there is no folder"), ("~nobody-of-that-name/a.png", "cannot be a path")):
        result = run_cli(
            "routing", tiny_mixtral, "--data", "missing.txt", "--plot", tmp_path / name if "~" not in name else name
        )
        assert result.code in (2, 3)
        assert words in result.stderr
