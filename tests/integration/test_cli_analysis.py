"""`inspect --analysis`: every number against its definition, from the files alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_tensors, config_of, contents, copy_of
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
SHARES = [10, 20, 30, 40, 50, 60, 70, 80, 90]
STATISTICS = Path("moetool") / "statistics.safetensors"
CLOSE = {"rel": 0, "abs": 1e-6}  # numbers are rounded to six decimals


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def analysis(run_cli, path: Path, *options: object) -> dict[str, Any]:
    result = run_cli("inspect", path, "--analysis", *options, "--json")
    assert result.code == 0, result.stderr
    assert "Analyse" in result.stderr
    return json.loads(result.stdout, parse_constant=no_constants)["analysis"]


def experts(tensors: dict[str, Tensor], layer: int, role: str, count: int = 4) -> list[Tensor]:
    prefix = f"model.layers.{layer}.block_sparse_moe.experts"
    return [tensors[f"{prefix}.{expert}.{NAMES[role]}.weight"].double() for expert in range(count)]


def stored_base(path: Path, layer: int, role: str) -> Tensor:
    """With zeros where channels were pruned."""
    tensors, prefix = load_file(path / "model.safetensors"), f"model.layers.{layer}.block_sparse_moe.experts."
    base = tensors[f"{prefix}0.{NAMES[role]}.weight"].double()
    kept = tensors.get(prefix + "base_channels", torch.arange(48)).long()
    full = torch.zeros(48, 32, dtype=torch.float64)
    full[kept] = base.T if role == "down" else base
    return full.T if role == "down" else full


def cka(left: Tensor, right: Tensor) -> float:
    """tr(KHLH) / √(tr(KHKH) tr(LHLH))."""
    n = len(left)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    k, l = left @ left.T @ h, right @ right.T @ h  # noqa: E741
    return (torch.trace(k @ l) / (torch.trace(k @ k) * torch.trace(l @ l)).sqrt()).item()


def assert_similarity(told: dict[str, Any], matrices: list[Tensor | None]) -> None:
    """Of every pair of those that are there."""
    pairs = []
    for i, row in enumerate(told["matrix"]):
        for j, value in enumerate(row):
            left, right = matrices[i], matrices[j]
            if left is None or right is None:
                assert value is None
                continue
            assert value == pytest.approx(cka(left, right), **CLOSE)
            pairs += [value] if i != j else []
    assert len(told["matrix"]) == len(matrices)
    assert told["mean"] == pytest.approx(sum(pairs) / len(pairs), **CLOSE)
    assert (told["min"], told["max"]) == (min(pairs), max(pairs))


def energy(matrices: list[Tensor]) -> list[float]:
    """Mean of what is retained; half a singular value has half of its energy."""
    retained = []
    for matrix in matrices:
        squared = torch.linalg.svdvals(matrix).square()
        position = [len(squared) * share / 100 for share in SHARES]
        parts = [(torch.tensor(at) - torch.arange(len(squared))).clamp(0, 1) for at in position]
        retained.append([((part * squared).sum() / squared.sum()).item() for part in parts])
    return torch.tensor(retained, dtype=torch.float64).mean(0).tolist()


def test_analysis_of_an_ordinary_model(run_cli, tiny_mixtral):
    told = analysis(run_cli, tiny_mixtral)
    assert told["shares"] == SHARES
    assert [layer["layer"] for layer in told["layers"]] == [0, 1, 2]
    tensors = load_file(tiny_mixtral / "model.safetensors")
    for layer in told["layers"]:
        assert (layer["sensitivity"], layer["token_share"]) == (None, None)
        for role in NAMES:
            entry, matrices = layer[role], experts(tensors, layer["layer"], role)
            mean = torch.stack(matrices).mean(0)
            assert (entry["base"], entry["sensitivity"], entry["cka_v"], entry["cka_u"]) == ("mean", None, None, None)
            assert_similarity(entry["cka"], matrices)
            assert 0.5 < entry["cka"]["min"] < entry["cka"]["max"] < 1, "experts of this model have much in common"
            assert entry["energy"]["experts"] == pytest.approx(energy(matrices), **CLOSE)
            assert entry["energy"]["base"] == pytest.approx(energy([mean]), **CLOSE)
            assert entry["energy"]["delta"] == pytest.approx(energy([matrix - mean for matrix in matrices]), **CLOSE)
            assert entry["energy"]["zero_deltas"] == []
    assert any("plain mean" in note for note in told["notes"])
    assert any("no sensitivity" in note for note in told["notes"])


@pytest.fixture(scope="module")
def pruned(compress, tiny_mixtral) -> Path:
    """With ranks of all kinds and a pruned base."""
    return compress(tiny_mixtral, "--ratio", 0.45, "--prune-base", 0.25, "--pruning", "semi-dynamic").path


@pytest.mark.parametrize("which", ["small", "pruned", "decomposed"])
def test_analysis_of_a_base(request, run_cli, synthesize, which):
    path = request.getfixturevalue(which)
    told, tensors = analysis(run_cli, path), synthesize(path)
    stored = load_file(path / "model.safetensors")
    partial = similar = zero = 0
    for layer in told["layers"]:
        index = layer["layer"]
        for role in NAMES:
            entry, matrices = layer[role], experts(tensors, index, role)
            assert_similarity(entry["cka"], matrices)
            assert entry["energy"]["experts"] == pytest.approx(energy(matrices), **CLOSE)
            specs = config_of(path)["quantization_config"]["layers"].get(str(index), {}).get(role)
            base = torch.stack(matrices).mean(0) if specs is None else stored_base(path, index, role)
            assert entry["base"] == ("mean" if specs is None else "stored")
            assert entry["energy"]["base"] == pytest.approx(energy([base]), **CLOSE)
            deltas = [matrix - base for matrix in matrices]
            lost = [expert for expert, delta in enumerate(deltas) if not delta.any()]
            assert entry["energy"]["zero_deltas"] == lost
            assert lost == [expert for expert, spec in enumerate(specs or ()) if spec == "low-rank:0"]
            if len(lost) == 4:
                assert entry["energy"]["delta"] is None
            else:
                assert entry["energy"]["delta"] == pytest.approx(energy([d for d in deltas if d.any()]), **CLOSE)
            own = f"model.layers.{index}.block_sparse_moe.experts.moetool.{{}}.{role}.{{}}"
            left, right = ([stored.get(own.format(expert, name)) for expert in range(4)] for name in "uv")
            if sum(factor is not None for factor in left) < 2:
                assert (entry["cka_u"], entry["cka_v"]) == (None, None)
            else:
                assert_similarity(entry["cka_u"], [None if u is None else u.double() for u in left])
                assert_similarity(entry["cka_v"], [None if v is None else v.double().T for v in right])
                similar += 1
            partial += specs is not None and None in left
            zero += len(lost)
    notes = "\n".join(told["notes"])
    assert (similar > 0) == (which != "decomposed")
    assert ("have no similarity of V and U" in notes) == (partial > 0)
    assert ("deltas to the base are zero" in notes) == (zero > 0)
    assert ("Pruned channels" in notes) == (which == "pruned")
    assert ("Dynamic pruning" in notes) == (which == "pruned")


@pytest.mark.parametrize("which", ["small", "decomposed"])
def test_sensitivity_is_that_of_the_statistics(request, run_cli, synthesize, which):
    path = request.getfixturevalue(which)
    told, tensors = analysis(run_cli, path), synthesize(path)
    measured = load_file(path / STATISTICS)
    for layer in told["layers"]:
        index = layer["layer"]
        tokens = measured[f"{index}.tokens"].double()
        assert layer["token_share"] == pytest.approx((tokens / tokens.sum()).tolist(), **CLOSE)
        assert sum(layer["token_share"]) == pytest.approx(1, abs=1e-5)
        for role in NAMES:
            traces = measured[f"{index}.fisher.{role}"].double().sum(1).tolist()
            costs = [
                trace * matrix.square().mean().item()
                for trace, matrix in zip(traces, experts(tensors, index, role), strict=True)
            ]
            assert layer[role]["sensitivity"] == pytest.approx(sum(costs), rel=1e-6)
            assert layer[role]["sensitivity"] > 0
        assert layer["sensitivity"] == pytest.approx(sum(layer[role]["sensitivity"] for role in NAMES))
    assert "sensitivity" not in "\n".join(told["notes"])


def test_statistics_without_gradients(run_cli, small, tmp_path):
    """A forward pass alone counts tokens."""
    path = copy_of(small, tmp_path / "copy")
    measured = load_file(path / STATISTICS)
    save_file({name: t * (0 if "fisher" in name else 1) for name, t in measured.items()}, path / STATISTICS)
    told = analysis(run_cli, path)
    assert all(layer["sensitivity"] is None and layer["token_share"] for layer in told["layers"])
    assert "No gradients were measured in layers 0, 1, 2: no sensitivity." in told["notes"]


@pytest.mark.parametrize("damage", ["cut", "narrow", "incomplete"])
def test_damaged_statistics_are_named(run_cli, small, tmp_path, damage):
    path = copy_of(small, tmp_path / "copy")
    file = path / STATISTICS
    measured = load_file(file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "narrow":
        save_file({**measured, "1.fisher.up": measured["1.fisher.up"][:, :-1].contiguous()}, file)
    else:
        save_file({name: tensor for name, tensor in measured.items() if name != "1.tokens"}, file)
    result = run_cli("inspect", path, "--analysis")
    assert result.code == 3
    assert STATISTICS.as_posix() in result.stderr
    assert "Traceback" not in result.stderr
    file.unlink()
    assert run_cli("inspect", path, "--analysis").code == 0, "the advice works"


def test_only_these_layers(run_cli, small):
    everything = analysis(run_cli, small)
    told = analysis(run_cli, small, "--layers", "2,0")
    assert told["layers"] == [everything["layers"][0], everything["layers"][2]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--analysis", "--layers", "3"), "layer 3 has no experts; there are 0, 1, 2"),
        (("--analysis", "--layers", "0,-1"), "layer -1 has no experts"),
        (("--analysis", "--layers", "0,first"), "0,4,8"),
        (("--analysis", "--layers", ""), "0,4,8"),
        (("--layers", "0"), "--analysis"),
    ],
)
def test_refused_layers(run_cli, tiny_mixtral, options, words):
    result = run_cli("inspect", tiny_mixtral, *options)
    assert result.code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_copies_are_all_the_same(run_cli, tiny_mixtral_bf16, tmp_path):
    """As right after upcycling: full similarity, no differences, and it is said why their energy is missing."""

    def repeat(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if match := re.search(r"experts\.(\d)\.", name):
                tensors[name] = tensors[name.replace(match[0], "experts.0.")].clone()

    told = analysis(run_cli, change_tensors(copy_of(tiny_mixtral_bf16, tmp_path / "copies"), repeat))
    for layer in told["layers"]:
        for role in NAMES:
            assert layer[role]["cka"] == {"matrix": [[1.0] * 4] * 4, "mean": 1.0, "min": 1.0, "max": 1.0}
            assert layer[role]["energy"]["delta"] is None
            assert layer[role]["energy"]["zero_deltas"] == [0, 1, 2, 3]
            assert layer[role]["energy"]["base"] == layer[role]["energy"]["experts"]
    assert any(note.startswith("36 of 36 deltas to the base are zero") for note in told["notes"])


def test_an_expert_of_zeros(run_cli, tiny_mixtral, tmp_path):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    told = analysis(run_cli, change_tensors(copy_of(tiny_mixtral, tmp_path / "zero"), lambda t: t[name].zero_()))
    entry = told["layers"][1]["up"]
    assert entry["cka"]["matrix"][2] == [None] * 4
    assert entry["cka"]["matrix"][0][2] is None
    assert 0 < entry["cka"]["mean"] < 1
    assert entry["energy"]["experts"] is None
    assert any("no energy to retain: 1 up" in note for note in told["notes"])
    assert any("has no similarity: 1 up" in note for note in told["notes"])


def test_one_expert_has_nobody_to_be_like(run_cli, make_mixtral, save_model, tmp_path):
    path = save_model(make_mixtral(num_local_experts=1, num_experts_per_tok=1), tmp_path / "one")
    told = analysis(run_cli, path)
    assert told["layers"][0]["gate"]["cka"] == {"matrix": [[1.0]], "mean": None, "min": None, "max": None}
    assert "One expert alone has no similarity." in told["notes"]
    assert run_cli("inspect", path, "--analysis").code == 0


@pytest.mark.parametrize("which", ["tiny_mixtral", "small"])
def test_a_number_that_is_none(request, run_cli, tmp_path, which):
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.block_sparse_moe.experts.0.w1.weight"][3, 3] = torch.nan

    path = change_tensors(copy_of(request.getfixturevalue(which), tmp_path / "broken"), damage)
    result = run_cli("inspect", path, "--analysis", "--json")
    assert result.code == 3
    assert re.search(r"The gate matrix of expert 0 in layer 1 of .* has NaN or infinite values", result.stderr)
    assert result.stdout == ""


def test_analysis_for_people(run_cli, small, tiny_mixtral):
    result, told = run_cli("inspect", small, "--analysis"), analysis(run_cli, small)
    assert result.code == 0
    assert "Analyse: done" in result.stderr
    assert result.stdout.startswith("model ")
    first = told["layers"][0]
    similarity = "{mean:.3f} ({min:.3f} … {max:.3f})".format(**first["gate"]["cka"])
    cells = " │ ".join(f"{value:.3f}" for value in first["gate"]["energy"]["experts"])
    for line in (
        rf"^│ 0 +│ gate │ +{re.escape(similarity)} │",
        rf"^│ 0 +│ gate │ +experts │ {re.escape(cells)} │$",
        r"^│ 0 +│ gate │ +stored base │",
        r"^│ 2 +│ down │ +deltas │",
        rf"^│ 0 +│ +{re.escape(format(first['sensitivity'], '.2e'))} │.*{min(first['token_share']):.1%} … ",
    ):
        assert re.search(line, result.stdout, re.M), line
    assert re.findall(r"^note: (.*)$", result.stdout, re.M) == told["notes"]
    untouched = run_cli("inspect", tiny_mixtral, "--analysis").stdout
    assert "mean base" in untouched
    assert "stored base" not in untouched
    assert "CKA" not in run_cli("inspect", tiny_mixtral).stdout


def test_analysis_writes_nothing(run_cli, small):
    before = contents(small)
    told = run_cli("inspect", small, "--json").json
    analysed = run_cli("inspect", small, "--analysis", "--json").json
    assert {name: value for name, value in analysed.items() if name != "analysis"} == told
    assert contents(small) == before
