from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginectl.errors import ConfigError
from enginectl.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("4GB", 4 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5gib", 3 * 2**29),
        ("1073741824", 2**30),
        ("7B", 7),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes_are_read(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("24G", "write 24GB or 24GiB"),
        ("24 gigs", "unknown unit 'gigs'"),
        ("lots", "not a size"),
        ("-1GiB", "not a size"),
        ("", "not a size"),
        ("1.5", "fraction of a byte"),
        (-1, "not a size"),
        (True, "not a size"),
    ],
)
def test_what_is_not_a_size_is_an_error_that_says_what_to_write(text: str | int, says: str) -> None:
    with pytest.raises(ConfigError, match="--memory") as caught:
        parse_size(text, what="--memory")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (512, "512 B"), (2**30, "1 GiB"), (3 * 2**29, "1.50 GiB"), (2**50, "1024 TiB")]
)
def test_sizes_are_written_in_the_largest_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 2**60))
def test_a_written_size_reads_back_within_its_rounding(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == pytest.approx(num_bytes, rel=0.006)
