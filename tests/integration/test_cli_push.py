"""`moetool push`: what of a checkpoint goes to a hub, and what does not. The hub is one of ours, on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, copy_of
from fake_hub import FakeHub, fake_hub
from huggingface_hub import constants

# Of httpx about huggingface_hub.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Without Xet, whose servers have a protocol of their own."""
    with fake_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
        yield found


def test_a_checkpoint_arrives_whole_and_nothing_else(run_cli: Any, small: Path, tmp_path: Path, hub: FakeHub) -> None:
    output = copy_of(small, tmp_path / "out")
    (output / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.")
    expected = contents(output, costs=True)
    for left_out in (".cache/huggingface/state", ".git/HEAD", "model.safetensors.tmp"):
        (output / left_out).parent.mkdir(parents=True, exist_ok=True)
        (output / left_out).write_text("x")
    result = run_cli("push", output, "me/model", "--message", "First.", "--json")
    assert result.code == 0, result.stderr
    assert hub.files == {"me/model": expected}
    assert hub.private == {"me/model": True}
    assert hub.messages == ["First."]
    assert result.json["url"] == f"{hub.endpoint}/me/model"
    assert {file["name"]: file["bytes"] for file in result.json["files"]} == {
        name: len(content) for name, content in expected.items()
    }
    assert result.json["bytes"] == sum(map(len, expected.values()))
    # Again, with one more file: to the repository that is there.
    (output / "NOTICE").write_text("Of nobody.")
    assert run_cli("push", output, "me/model").code == 0
    assert hub.files["me/model"]["NOTICE"] == b"Of nobody."


def test_public_is_said(run_cli: Any, small: Path, hub: FakeHub) -> None:
    assert run_cli("push", small, "me/model", "--public").code == 0
    assert hub.private == {"me/model": False}


def test_a_dry_run_asks_no_hub(run_cli: Any, small: Path, hub: FakeHub) -> None:
    result = run_cli("push", small, "me/model", "--dry-run")
    assert result.code == 0, result.stderr
    assert hub.files == {}
    assert all(name in result.stdout for name in contents(small))
    assert "nothing was uploaded" in result.stdout


def test_what_is_unfinished_or_damaged_stays_here(run_cli: Any, small: Path, tmp_path: Path, hub: FakeHub) -> None:
    output = copy_of(small, tmp_path / "out")
    (output / ".moetool").mkdir()
    (output / ".moetool" / "journal.jsonl").touch()
    result = run_cli("push", output, "me/model")
    assert (result.code, "unfinished" in result.stderr) == (3, True)
    (output / ".moetool" / "journal.jsonl").unlink()
    (output / ".moetool").rmdir()
    weights = output / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    result = run_cli("push", output, "me/model")
    assert (result.code, "model.safetensors" in result.stderr) == (5, True)
    assert run_cli("push", tmp_path / "nowhere", "me/model").code == 2
    assert run_cli("push", "owner/model", "me/model").code == 2
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "model.gguf").touch()
    result = run_cli("push", exported, "me/model")
    assert (result.code, f"hf upload me/model {exported} --private" in result.stderr) == (2, True)
    assert hub.files == {}


def test_weights_of_another_model_are_not_mixed_with_these(run_cli: Any, small: Path, hub: FakeHub) -> None:
    hub.files["me/model"] = {"model-00001-of-00002.safetensors": b"", "README.md": b""}
    result = run_cli("push", small, "me/model")
    assert result.code == 2
    assert "model-00001-of-00002.safetensors" in result.stderr
    assert len(hub.files["me/model"]) == 2


@pytest.mark.parametrize(
    ("repo", "code", "said"), [("me/model", 3, "hf auth login"), ("not a name", 2, "cannot be a repository")]
)
def test_what_the_hub_refuses_is_said(run_cli: Any, small: Path, hub: FakeHub, repo: str, code: int, said: str) -> None:
    hub.refused.add("/api/repos/create")
    result = run_cli("push", small, repo)
    assert result.code == code
    assert said in result.stderr
