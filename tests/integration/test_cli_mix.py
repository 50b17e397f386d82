"""`--mix`: half of a calibration is the bundled text, or as much as is asked for, and everything says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from safetensors.torch import load_file
from sampling import sampled
from transformers import AutoTokenizer

from moetool.calibration import readable
from moetool.calibration.mixing import ONE_KIND
from moetool.calibration.readable import ReadableText
from moetool.calibration.sweep import Sweep

REAP = ("--method", "reap", "--experts", 2)
SMALL = ("--samples", 16, "--sequence-length", 32)
HALF = "16 windows: 8 of tiny.txt, 8 of the bundled text in 8 kinds"


@pytest.fixture
def text(tiny_text: Path) -> tuple[object, ...]:
    return "--calibration", tiny_text, *SMALL


def test_half_of_the_windows_by_default(run_cli: Any, tiny_mixtral: Path, text: Any, tmp_path: Path) -> None:
    """The plan, the log, the result, the card and the report name both texts."""
    job = ("compress", tiny_mixtral, tmp_path / "out", *REAP, *text)
    planned = run_cli(*job, "--dry-run", "--json").json
    assert planned["texts"] == HALF
    assert "note" not in planned
    assert HALF in run_cli(*job, "--dry-run").stdout
    made = run_cli(*job, "--json")
    assert made.code == 0, made.stderr
    assert f"Calibration on {HALF}." in made.stderr
    assert made.json["calibration"]["text"] == HALF
    assert made.json["calibration"]["kinds"]["tiny.txt"] == 8
    assert sum(made.json["calibration"]["kinds"].values()) == made.json["calibration"]["windows"] == 16
    assert HALF in (tmp_path / "out" / "README.md").read_text()
    page = tmp_path / "page.html"
    assert run_cli("report", tmp_path / "out", page).code == 0
    assert HALF in page.read_text()
    named = ("--mix", "50%")
    assert run_cli(*job[:2], tmp_path / "named", *job[3:], *named).code == 0
    assert contents(tmp_path / "named") == contents(tmp_path / "out")


def test_another_share_is_another_result(run_cli: Any, tiny_mixtral: Path, text: Any, tmp_path: Path) -> None:
    """And a run that was begun with one is not gone on with another."""
    job = ("compress", tiny_mixtral, tmp_path / "out", "--method", "d2moe", "--ratio", 0.3, *text)
    assert run_cli(*job, "--mix", 0.25).code == 0
    other = run_cli(*job, "--resume")
    assert other.code == 2
    assert "settings" in other.stderr
    again = run_cli("report", tmp_path / "out", tmp_path / "page.html", "--json")
    assert "--mix 0.25" in again.json["made"]["command"]
    assert run_cli(*job[:2], tmp_path / "half", *job[3:]).code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "half"))
    assert any(not torch.equal(first[name], second[name]) for name in first.keys() & second.keys())


@pytest.mark.parametrize("options", [("--mix", 0), ("--calibration", "bundled:code")])
def test_one_kind_alone_is_told(run_cli: Any, tiny_mixtral: Path, text: Any, tmp_path: Path, options: Any) -> None:
    job = ("compress", tiny_mixtral, tmp_path / "out", *REAP, *text, *options)
    assert run_cli(*job, "--dry-run", "--json").json["note"] == ONE_KIND
    made = run_cli(*job)
    assert ONE_KIND in made.stderr
    assert ONE_KIND in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["bundled", "bundled:prose"])
def test_nothing_is_added_to_what_names_it(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, name: str
) -> None:
    data = ("--calibration", f"{tiny_text}@3,{name}", *SMALL)
    planned = run_cli("compress", tiny_mixtral, tmp_path / "out", *REAP, *data, "--dry-run", "--json").json
    assert planned["texts"].startswith("16 windows: 12 of tiny.txt, 4 of the bundled text ")


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("options", [REAP, ("--method", "quantize", "--bits", 4, "--group-size", 16)])
def test_a_share_without_a_text(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, options: Any, share: float) -> None:
    refused = run_cli("compress", tiny_mixtral, "--method", "d2moe", tmp_path / "out", *options, "--mix", share)
    assert refused.code == 2
    assert "--mix is the share of bundled text beside a text of yours" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["bundled", "self", "{text},bundled:prose"])
def test_a_share_beside_what_has_many_kinds(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, name: str
) -> None:
    """Nothing would be mixed in, so that a share which is typed is refused; 0 says what happens anyway."""
    data = ("--calibration", name.format(text=tiny_text), *SMALL)
    job = ("compress", tiny_mixtral, tmp_path / "out", *REAP, *data, "--dry-run", "--mix")
    refused = run_cli(*job, "25%")
    assert refused.code == 2
    assert "beside which --mix adds nothing" in refused.stderr
    assert run_cli(*job, 0).code == 0


def test_no_text(run_cli: Any, tiny_mixtral: Path, dense: Any, tmp_path: Path) -> None:
    """`--calibration none` is as if no text was named where none is needed, and refused elsewhere."""
    job = ("compress", tiny_mixtral, tmp_path / "out", "--calibration", "none", "--dry-run", "--json")
    nearest = run_cli(*job, "--method", "quantize", "--bits", 4, "--group-size", 16)
    assert nearest.code == 0
    assert "texts" not in nearest.json
    for needy in (REAP, ("--ratio", 0.4), ("--method", "quantize", "--bits", 4, "--rounding", "error-feedback")):
        refused = run_cli(*job, *needy)
        assert refused.code == 2
        assert "--calibration none: this needs a text. Leave the option out" in refused.stderr
        assert "--method quantize" in refused.stderr
    other = run_cli("moefy", dense("llama"), tmp_path / "out", "--keep", 0.5, "--calibration", "none")
    assert other.code == 2
    assert other.stderr.endswith("Leave the option out, and the bundled text is used.\n")


@pytest.mark.parametrize("share", [1, -0.1, "nan"])
def test_what_is_no_share(run_cli: Any, tiny_mixtral: Path, text: Any, tmp_path: Path, share: object) -> None:
    refused = run_cli("compress", tiny_mixtral, tmp_path / "out", *REAP, *text, "--mix", share)
    assert refused.code == 2
    assert "--mix" in refused.stderr


def test_a_tokenizer_that_reads_half_of_it(
    run_cli: Any, tiny_mixtral: Path, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds that it cuts into bytes are left out and named; where all are, the text alone is used, unless a share was
    typed."""
    whole = readable.readable_text

    def some(kinds: Any, tokenizer: Any) -> ReadableText:
        found = whole(kinds, tokenizer)
        return ReadableText({kind: found.texts[kind] for kind in ("code", "prose")}, ("languages/russian-pages",))

    job = ("compress", tiny_mixtral, tmp_path / "out", *REAP, *text)
    monkeypatch.setattr(readable, "readable_text", some)
    made = run_cli(*job)
    assert made.code == 0, made.stderr
    assert "splits their words into bytes: languages/russian-pages." in made.stderr
    assert "16 windows: 8 of tiny.txt, 8 of the bundled text in 2 kinds" in made.stderr
    monkeypatch.setattr(readable, "readable_text", lambda kinds, tokenizer: ReadableText({}, ()))
    alone = run_cli(*job, "--overwrite")
    assert alone.code == 0, alone.stderr
    assert "cuts all of the bundled text into bytes: the given text alone is used." in alone.stderr
    assert "Calibration on 16 windows of tiny.txt." in alone.stderr
    refused = run_cli(*job[:2], tmp_path / "no", *job[3:], "--mix", 0.5)
    assert refused.code == 3
    assert "cuts all of the bundled text into bytes: give --mix 0." in refused.stderr


@pytest.mark.parametrize(
    "job",
    sampled(("compress", "moefy", "upcycle", "gguf", "compressed-tensors"), ("compress", "moefy", "gguf")),
)
def test_every_job_that_measures_takes_its_share(
    run_cli: Any, tiny_mixtral: Path, dense: Any, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """And each of its windows knows of which kind it is, those that gradients are taken on as well."""
    arguments: dict[str, tuple[object, ...]] = {
        "compress": (
            "compress",
            tiny_mixtral,
            "--method",
            "d2moe",
            tmp_path / "out",
            "--rank",
            4,
            "--gradient-samples",
            4,
        ),
        "moefy": ("moefy", dense("llama"), tmp_path / "out", "--experts", 4, "--selector", "oracle"),
        "upcycle": ("upcycle", dense("llama"), tmp_path / "out", "--experts", 4, "--center-router"),
        "gguf": ("export", tiny_mixtral, tmp_path / "out", "--format", "gguf"),
        "compressed-tensors": (
            *("export", tiny_mixtral, tmp_path / "out", "--format", "compressed-tensors"),
            *("--bits", 4, "--group-size", 16),
        ),
    }
    if job == "gguf":
        pytest.importorskip("gguf")
    sweeps: list[Sweep] = []
    made = Sweep.__init__

    def noted(self: Sweep, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        sweeps.append(self)

    monkeypatch.setattr(Sweep, "__init__", noted)
    planned = run_cli(*arguments[job], *text, "--dry-run", "--json")
    assert planned.json["texts"] == HALF, planned.stderr
    run = run_cli(*arguments[job], *text, "--json")
    assert run.code == 0, run.stderr
    assert f"Calibration on {HALF}." in run.stderr
    whole, few = (next(sweep for sweep in sweeps if sweep.count == count) for count in (16, sweeps[1].count))
    assert whole.kinds[0] == "tiny.txt"
    assert torch.bincount(whole.of_kind).tolist() == [8, *[1] * 8]
    assert torch.equal(few.of_kind, whole.of_kind[: few.count])
    assert few.kinds == whole.kinds
    own = AutoTokenizer.from_pretrained(arguments[job][1]).decode
    read = Path(text[1]).read_text()
    for window, kind in zip(whole.windows, whole.of_kind, strict=True):
        assert (own(window).strip("\N{REPLACEMENT CHARACTER}") in read) == (kind == 0)


def test_a_proof_is_on_the_text_alone(run_cli: Any, dense: Any, text: Any, tmp_path: Path) -> None:
    """Which nothing is measured on: no plan or log speaks of a share."""
    job = ("upcycle", dense("llama"), tmp_path / "out", "--experts", 4, "--no-center-router", *text)
    assert "texts" not in run_cli(*job, "--dry-run", "--json").json
    made = run_cli(*job)
    assert made.code == 0, made.stderr
    assert "bundled" not in made.stderr + made.stdout
