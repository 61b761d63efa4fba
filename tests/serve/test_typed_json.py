"""Values keep their types from a row to what scores it."""

import datetime
import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve import typed_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEPT = SCALARS | st.datetimes() | st.dates() | st.binary() | st.fractions() | st.decimals(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    KEPT,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.integers()), inner)
        | st.dictionaries(st.sampled_from(["$tuple", "$dict", "$", "$unknown"]), inner)
        | st.sets(st.integers())
    ),
    max_leaves=10,
)


def alike(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


@given(VALUES)
def test_what_goes_in_comes_out(value):
    assert alike(typed_json.loads(typed_json.dumps(value)), value)


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=2), inner), max_leaves=10))
def test_plain_json_stays_plain(value):
    assert json.loads(typed_json.dumps(value)) == value or "$" in json.dumps(value)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (Decimal("0.10"), Decimal("0.10")),
        (Fraction(1, 3), Fraction(1, 3)),
        (1 + 2j, 1 + 2j),
        (datetime.timedelta(seconds=5), datetime.timedelta(seconds=5)),
    ],
)
def test_other_numbers(value, kept):
    assert alike(typed_json.loads(typed_json.dumps(value)), kept)


def test_what_cannot_be_kept_is_said():
    with pytest.raises(TypeError, match="a value of type object cannot be kept"):
        typed_json.dumps({"a": [object()]})
    with pytest.raises(ValueError, match="JSON"):
        typed_json.dumps([math.nan])
