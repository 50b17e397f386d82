"""`compress --method d2moe --refine`: the same bytes of another content."""

import pytest
from checkpoints import weight_bytes, weights

from moetool.checkpoint.manifest import read_manifest


@pytest.mark.parametrize(("ratio", "bits"), [(0.4, 16), (0.25, 8), (0.35, 8)])  # 8 bits: some deltas whole, and none
def test_refining_changes_base_and_factors_but_no_size(run_cli, calibration, tiny_mixtral_bf16, tmp_path, ratio, bits):
    arguments = ("compress", tiny_mixtral_bf16, "--method", "d2moe")
    options = (*calibration, "--ratio", ratio, "--factor-bits", bits, "--json")
    plain = run_cli(*arguments, tmp_path / "plain", *options)
    refined = run_cli(*arguments, tmp_path / "refined", *options, "--refine", 12)
    assert (plain.code, refined.code) == (0, 0), refined.stderr
    assert weight_bytes(tmp_path / "plain") == weight_bytes(tmp_path / "refined")
    assert weights(tmp_path / "plain") != weights(tmp_path / "refined")
    assert run_cli("verify", tmp_path / "refined", "--against", tiny_mixtral_bf16).code == 0
    told = [layer["refined"] for layer in read_manifest(tmp_path / "refined").layers.values()]
    assert told
    assert all(own["after"] <= own["before"] for own in told)
    assert any(own["after"] < own["before"] for own in told)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_a_job_was_killed_at_is_not_refined_twice(crash, tiny_mixtral_bf16, calibration, tmp_path):
    """Killed before every fourth of the last changes, when bases and deltas are moved."""
    job = (
        "compress",
        tiny_mixtral_bf16,
        "--method",
        "d2moe",
        "--ratio",
        0.4,
        *calibration,
        "--refine",
        3,
        "--shard-size",
        "40kB",
    )
    changes = crash.whole(tmp_path / "quiet", job)
    for at in range(changes * 2 // 3, changes - 4, 4):
        crash.goes_on(tmp_path / str(at), job, at, tmp_path / "quiet")


def test_refining_excludes_shared_factors(run_cli, calibration, tiny_mixtral, tmp_path):
    result = run_cli(
        "compress",
        tiny_mixtral,
        "--method",
        "d2moe",
        tmp_path / "out",
        *calibration,
        "--rank",
        2,
        "--refine",
        1,
        "--share",
        "v",
    )
    assert result.code == 2
    assert "--share v" in result.stderr
