"""`Did you mean …`: for whatever is named on the command line or in a preset, and nothing where nothing is near."""

import pytest

from moetool.errors import did_you_mean


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("comprss", "a", "b"), "Did you mean compress?"),
        (("compress", "a", "b", "--ratoi", "0.4"), "No such option: --ratoi. Did you mean --ratio?"),
        (("tune", "a", "b", "--no-resme"), "Did you mean --resume?"),
        (("export", "a", "b", "--format", "gguf", "--type", "Q3_K_XL"), "Did you mean q3_k_l?"),
        (("compress", "a", "b", "--merge", "fishr"), "Did you mean fisher?"),
        (("list", "methds"), "Did you mean methods?"),
        (("upcycle", "a", "b", "--method", "vanila"), "Did you mean vanilla?"),
        (("compress", "a", "b", "--preset", "d2moe-4"), "Did you mean d2moe-40?"),
        (("upcycle", "a", "b", "--rank", "3"), "No such option: --rank. It exists with --method ders-lowrank."),
        (("export", "a", "b", "--expert", "3"), "It exists with --format dense."),
        (
            ("compress", "a", "b", "--method", "ders-quantize", "--ratio", "0.6", "--bits", "2"),
            "No such option: --ratio. Here --bits sets the size. --ratio exists with --method auto or",
        ),
        (("compress", "a", "b", "--method", "ders-sparsify", "--size", "3G"), "Here --drop sets the size."),
        (("quantize-delta", "a", "b", "--ratio", "0.6"), "Here --bits sets the size."),
        (("sparsify-delta", "a", "b", "--ratio", "0.6"), "Here --drop sets the size."),
        (
            ("export", "a", "b", "--format", "compressed-tensors", "--size", "3G"),
            "Here --bits sets the size. --size exists with --format gguf or mlx.",
        ),
        (("export", "a", "b", "--format", "gguf", "--ratio", "0.6"), "Here --size sets the size."),
        (("compress", "a", "b", "--num-calibration-samples", "3"), "Here it is --samples."),
        (("compress", "a", "b", "--dataset", "c4"), "Here it is --calibration."),
        (("eval", "a", "--dataset", "c4"), "Here it is --data."),
        (("eval", "a", "--samples", "8"), "Here it is --windows."),
        (("compress", "a", "b", "--windows", "8"), "Here it is --samples."),
        (("verify", "a", "--data", "c4"), "Here it is --text."),
        (("repair", "a", "b", "--against", "c"), "Here it is --to."),
        (("compare", "a", "--ratio", "0.4"), "Did you mean --ratios?"),
        (("eval", "a", "--port", "80"), "No such option: --port. It is an option of `moetool serve`."),
        (
            ("push", "a", "b", "--seed", "8"),
            "It is an option of `moetool upcycle`, `moetool moefy`, `moetool",
        ),
        (("upcycle", "a", "b", "--method", "ders"), "Did you mean ders-lowrank or ders-sparse?"),
        (("upcycle", "a", "b", "8"), "Only INPUT and OUTPUT are typed without an option's name"),
        (("generate", "a", "two", "words"), "Only MODEL and PROMPT are typed without an option's name"),
        (("upcycle", "a", "b", "--experts", "many"), "'--experts': it should be a valid integer\n"),
        (("compress", "--model", "a"), "INPUT is typed without a name: `moetool compress INPUT OUTPUT`."),
        (("compress", "a", "--output-dir", "b"), "OUTPUT is typed without a name"),
        (("compress", "a", "b", "--ratio", "40"), "above 0 and below 1; for 40 % write 0.4 or 40%"),
        (("compress", "a", "b", "--ratio", "1.2"), "--ratio 1.2: it is a share of all bytes, above 0 and below 1"),
        (("compress", "a", "b", "--ratio", "half"), "--ratio half: write a share like 0.4 or 40%"),
    ],
)
def test_a_name_that_is_nearly_right(run_cli, arguments, hint):
    result = run_cli(*arguments)
    assert (result.code, result.stdout) == (2, "")
    assert hint in result.stderr


def test_arguments_in_the_wrong_order(run_cli, tiny_mixtral, tmp_path, monkeypatch):
    """A name without a folder could be one of the hub; nothing is looked for there."""
    monkeypatch.chdir(tmp_path)
    result = run_cli("compress", "small", tiny_mixtral, "--ratio", "75%")
    assert result.code == 2
    assert f"OUTPUT {tiny_mixtral} is a model, and INPUT small is not here. INPUT comes first" in result.stderr


@pytest.mark.parametrize("value", ["many", "0"])
def test_a_value_that_does_not_fit_is_not_called_input(run_cli, value):
    """INPUT is the checkpoint."""
    result = run_cli("compress", "a", "b", "--ratio", 0.4, "--samples", value)
    assert result.code == 2
    assert "valid integer" in result.stderr or "it should be greater than or equal to 1" in result.stderr
    assert "Input" not in result.stderr


def test_a_column_that_is_nearly_right(run_cli, tiny_mixtral, tmp_path):
    table = tmp_path / "text.jsonl"
    table.write_text('{"Body": "words of a text"}\n')
    result = run_cli("eval", tiny_mixtral, "--data", f"{table}:::bdy")
    assert result.code == 3
    assert "Did you mean Body?" in result.stderr


def test_a_preset_file_with_slips(run_cli, tiny_mixtral, tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("command: compress\nmethod: d2moe\noptions: {ratoi: 0.4, merge: fishr}\nvariants: {small: {}}\n")
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", "--preset", preset)
    assert result.code == 2
    assert "Did you mean ratio?" in result.stderr
    assert "Did you mean fisher?" in result.stderr
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", "--preset", f"{preset}:smal")
    assert "Did you mean small?" in result.stderr


@pytest.mark.parametrize("arguments", [("xyzzy",), ("inspect", "a", "--xyzzy"), ("list", "xyzzy")])
def test_nothing_is_made_up(run_cli, arguments):
    result = run_cli(*arguments)
    assert result.code == 2
    assert "xyzzy" in result.stderr
    assert "Did you mean" not in result.stderr


def test_case_does_not_matter():
    assert did_you_mean("MIXTRAL", ["mixtral"]) == " Did you mean mixtral?"
