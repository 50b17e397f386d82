"""KL divergence is never negative: what rounding makes of it is not shown as it is recorded."""

import math

import pytest

from moetool.cli.commands.compare import cells
from moetool.cli.evaluations import over_texts, print_texts
from moetool.cli.jobs import _repaired
from moetool.compare.results import ComparedModel
from moetool.measure.results import Divergence, OverTexts, TextLoss, shown_kl
from moetool.repair.results import RepairResult

ROUNDED = -1.2e-9


def lost(name: str, kl: float) -> TextLoss:
    against = Divergence(model="m", perplexity=1, nll=0, excess=0, excess_error=None, kl=kl, agreement=1)
    return TextLoss(name=name, perplexity=1, nll=0, windows=1, tokens=2, own_kind=name == "home", against=against)


@pytest.mark.parametrize(("kl", "shown"), [(ROUNDED, 0.0), (-0.0, 0.0), (3e-9, 3e-9), (-0.1, -0.1), (0.2, 0.2)])
def test_only_what_is_negative_by_rounding_is_zero(kl: float, shown: float) -> None:
    assert str(shown_kl(kl)) == str(shown)
    assert math.isnan(shown_kl(math.nan))


def test_models_that_are_the_same_show_no_negative_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [lost("home", ROUNDED), lost("other", 2 * ROUNDED)]
    print_texts(texts)
    found = OverTexts.of(texts)
    assert found is not None
    assert found.kl_mean == pytest.approx(1.5 * ROUNDED)
    assert found.abroad is None
    row = ComparedModel(name="same", method=None, asked=None, kl=ROUNDED)
    repaired = RepairResult(
        trained_parameters=1,
        kept_step=1,
        kl_before={"home": ROUNDED},
        kl_after={"home": ROUNDED},
        stopped=None,
        learning_rate=1,
        training_seconds=1,
    )
    shown = f"{capsys.readouterr().out} {over_texts(found)} {cells(row)} {_repaired(repaired)}"
    assert "0.000000" in shown
    assert "0.00'" in shown
    assert "0 → 0 on home" in shown
    assert "-" not in shown.replace("top-1", "")
