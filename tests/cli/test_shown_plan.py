"""What `--dry-run` prints of a plan."""

import pytest

from moetool.cli.jobs import print_plan
from moetool.job.estimate import Estimate


def test_fields_have_names_that_say_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"input_bytes": 1000, "experts_at_once": 8, "forms_per_matrix": 7, "moe_layers": 4, "routing": 80.0}
    print_plan(plan, Estimate(unknown="no machine"), None)
    said = capsys.readouterr().out
    for name in ("experts in memory at once", "forms tried per matrix", "MoE layers", "weight of routing loss"):
        assert f"\n{name} " in said
