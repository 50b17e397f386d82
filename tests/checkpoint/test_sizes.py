"""Sizes as people write and read them."""

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from moetool.checkpoint.sizes import (
    ByteSize,
    Part,
    Ratio,
    WindowShare,
    format_bytes,
    format_least_bytes,
    format_most_share,
    parse_bytes,
    parse_window_share,
)

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("5GB", 5 * GB),
        ("1500000", 1_500_000),
        ("1.5kB", 1500),
        ("1.5 KiB", 1536),
        (" 3 tb ", 3 * 10**12),
        ("2TiB", 2 * 2**40),
        ("10b", 10),
        ("7mib", 7 * 2**20),
    ],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "8 gigs", "-5GB", "1e9", "8GiBit", "5,5GB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like 8GiB or 500MB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["24", "1.5", " 999 "])
def test_a_size_that_lacks_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match=rf"has no unit; write {text.strip()}GB, "):
        parse_bytes(text)


@pytest.mark.parametrize("value", [8, None, 2.5])
def test_only_strings_are_parsed(value: Any) -> None:
    assert parse_bytes(value) is value


def test_sizes_of_options() -> None:
    class Options(BaseModel):
        memory: ByteSize

    assert Options(memory="8GiB").memory == 8 * 2**30  # type: ignore[arg-type]
    assert Options(memory=12).memory == 12
    for bad in ("0B", 0, -1, "much"):
        with pytest.raises(ValidationError):
            Options(memory=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 kB"),
        (340_896, "340.9 kB"),
        (93_405_585_408, "93.4 GB"),
        (1.5e12, "1.50 TB"),
        (-2000, "-2.0 kB"),
    ],
)
def test_sizes_as_people_read_them(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 123_840, 999_951, 2_300_000_001, 93_405_585_408, 5 * 10**12 + 1])
def test_a_size_that_is_the_least_is_enough_as_it_is_shown(count: int) -> None:
    typed = parse_bytes(format_least_bytes(count))
    assert isinstance(typed, int)
    assert count <= typed <= 1.1 * count + 1


def test_a_size_is_the_bytes_that_it_says() -> None:
    """In floating point 2.3 times a billion is less."""
    assert parse_bytes("2.3GB") == 2_300_000_000


@pytest.mark.parametrize(("share", "text"), [(0.8924, "0.892"), (0.33333, "0.333"), (0.5, "0.5"), (0.4999999, "0.499")])
def test_a_share_that_is_the_most_is_not_too_much_as_it_is_shown(share: float, text: str) -> None:
    assert format_most_share(share) == text


@pytest.mark.parametrize(("written", "share"), [("0.4", 0.4), ("40%", 0.4), ("62 %", 0.62), (0.4, 0.4), (".5", 0.5)])
def test_shares(written: object, share: float) -> None:
    assert TypeAdapter(Ratio).validate_python(written) == share


@pytest.mark.parametrize("written", ["40", 40, "100%", "0", "-0.4", "0.4.1", "4%0", "", None, "nan", "1e999"])
def test_what_is_no_share(written: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Ratio).validate_python(written)


@pytest.mark.parametrize(("written", "share"), [("0", 0.0), (0, 0.0), ("25%", 0.25), ("0 %", 0.0), (0.99, 0.99)])
def test_shares_of_windows_may_be_none_of_them(written: object, share: float) -> None:
    assert TypeAdapter(WindowShare).validate_python(written) == share


@pytest.mark.parametrize(("written", "part"), [("75%", 0.75), ("0.5", 0.5), (1, 1.0), ("100 %", 1.0), ("-5%", -0.05)])
def test_parts_of_anything_have_the_bounds_of_their_field(written: object, part: float) -> None:
    assert TypeAdapter(Part).validate_python(written) == part


@pytest.mark.parametrize(("written", "said"), [("50", "for 50 % write 0.5 or 50%"), ("half", "write a share like")])
def test_what_is_no_part(written: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(Part).validate_python(written)


@pytest.mark.parametrize(
    ("written", "said"), [("1", "below 1$"), ("-0.1", "at least 0"), ("25", "for 25 % write 0.25")]
)
def test_what_is_no_share_of_windows(written: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_window_share(written)
