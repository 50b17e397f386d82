"""KL divergence and excess loss are shown in thousandths of a nat; no divergence is negative by rounding."""

import math

import pytest

from moetool.cli.commands.compare import cells
from moetool.cli.evaluations import over_texts, print_texts
from moetool.cli.jobs import _repaired
from moetool.compare.results import ComparedModel
from moetool.measure.results import Divergence, OverTexts, TextLoss, shown_excess, shown_kl
from moetool.repair.results import RepairResult

ROUNDED = -1.2e-9


def lost(name: str, kl: float) -> TextLoss:
    against = Divergence(model="m", perplexity=1, nll=0, excess=0, excess_error=None, kl=kl, agreement=1)
    return TextLoss(name=name, perplexity=1, nll=0, windows=1, tokens=2, own_kind=name == "home", against=against)


@pytest.mark.parametrize(
    ("kl", "shown"), [(ROUNDED, "0.0000"), (-0.0, "0.0000"), (3e-9, "0.0000"), (-0.1, "-100"), (math.nan, "nan")]
)
def test_only_what_is_negative_by_rounding_is_zero(kl: float, shown: str) -> None:
    assert shown_kl(kl) == shown


@pytest.mark.parametrize(
    ("nats", "shown"),
    [(2.2e-4, "0.220"), (1.234e-5, "0.0123"), (0.0012345, "1.23"), (0.012345, "12.3"), (1.2345, "1234")],
)
def test_divergences_have_three_digits_in_thousandths_of_a_nat(nats: float, shown: str) -> None:
    assert shown_kl(nats) == shown
    assert shown_excess(-nats, nats) == f"-{shown} ± {shown}"
    assert shown_excess(nats, None) == shown


def test_the_unit_is_in_the_heading(capsys: pytest.CaptureFixture[str]) -> None:
    print_texts([lost("home", 0.2), lost("other", 0.1)])
    assert "Text by text, excess and KL in thousandths of a nat per token" in capsys.readouterr().out


def test_models_that_are_the_same_show_no_negative_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [lost("home", ROUNDED), lost("other", 2 * ROUNDED)]
    print_texts(texts)
    found = OverTexts.of(texts)
    assert found is not None
    assert found.kl_mean == pytest.approx(1.5 * ROUNDED)
    assert found.abroad is None
    row = ComparedModel(name="same", method=None, asked=None, kl=ROUNDED)
    repaired = RepairResult(
        trains="small",
        trained_parameters=1,
        kept_step=1,
        kl_before={"home": ROUNDED},
        kl_after={"home": ROUNDED},
        stopped=None,
        learning_rate=1,
        training_seconds=1,
    )
    shown = f"{capsys.readouterr().out} {over_texts(found)} {cells(row)} {_repaired(repaired)}"
    assert shown.count("0.0000") > 6
    assert "0.0000 → 0.0000 on home, in thousandths of a nat per token" in shown
    assert "-" not in shown.replace("top-1", "")
