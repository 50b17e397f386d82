"""What `--dry-run` prints of a plan."""

import pytest

from moetool.cli.jobs import print_plan
from moetool.job.estimate import Estimate
from moetool.job.result import PhaseTime


def test_fields_have_names_that_say_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"input_bytes": 1000, "experts_at_once": 8, "forms_per_matrix": 7, "moe_layers": 4, "routing": 80.0}
    print_plan(plan, Estimate(unknown="no machine"), None)
    said = capsys.readouterr().out
    for name in ("experts in memory at once", "forms tried per matrix", "MoE layers", "weight of routing loss"):
        assert f"\n{name} " in said


def test_phases_of_less_than_a_second_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Three of them at "1 s" each would not add up to a job of 1 s."""
    for seconds, shown in (((0.2, 0.3, 0.4), "about 1 s"), ((40, 5, 0.2), "about 45 s (Forward 40 s, Backward 5 s)")):
        phases = [PhaseTime(name, each) for name, each in zip(("Forward", "Backward", "Write"), seconds, strict=True)]
        print_plan({"input_bytes": 1000}, Estimate(phases), None)
        times = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time ")]
        assert [line.split(maxsplit=1)[1] for line in times] == [shown]
