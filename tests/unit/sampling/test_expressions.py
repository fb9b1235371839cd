"""Expressions over columns: three-valued logic against a slow model, and sentences for every slip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.sampling.expressions import parse_expression

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class _Column:
    values: NDArray[Any]
    is_missing: NDArray[np.bool_] | None = None
    names: tuple[str, ...] | None = None
    also: tuple[frozenset[str], ...] | None = None


ROLES = ("", "frontal", "lateral")


def _columns(roles: list[int], sizes: list[float | None], answers: list[bool | None]) -> dict[str, _Column]:
    codes = np.array(roles, np.uint16)
    numbers = np.array([np.nan if size is None else size for size in sizes])
    return {
        "role": _Column(codes, codes == 0, ROLES),
        "size": _Column(numbers, np.isnan(numbers)),
        "has_contrast": _Column(
            np.array([bool(answer) for answer in answers]), np.array([answer is None for answer in answers])
        ),
    }


def _holds(node: Any, row: dict[str, Any]) -> bool | None:
    """Evaluate a tree for one row, None for unknown: the model."""
    match node:
        case ("and", left, right):
            found = _holds(left, row), _holds(right, row)
            return False if False in found else None if None in found else True
        case ("or", left, right):
            found = _holds(left, row), _holds(right, row)
            return True if True in found else None if None in found else False
        case ("not", operand):
            inner = _holds(operand, row)
            return None if inner is None else not inner
        case ("missing", name):
            return row[name] is None
        case ("has_contrast",):
            return None if row["has_contrast"] is None else bool(row["has_contrast"])
        case ("in", values):
            return None if row["role"] is None else row["role"] in values
        case (sign, name, value):
            if row[name] is None:
                return None
            return bool(
                {"==": row[name] == value, "!=": row[name] != value}.get(
                    sign, _ordered(sign, row[name], value)
                )
            )
    raise AssertionError


def _ordered(sign: str, value: Any, bound: Any) -> bool:
    return bool(
        {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}.get(sign)
    )


def _text(node: Any) -> str:
    match node:
        case (("and" | "or") as word, left, right):
            return f"({_text(left)} {word} {_text(right)})"
        case ("not", operand):
            return f"(not {_text(operand)})"
        case ("missing", name):
            return f"{name} is missing"
        case ("has_contrast",):
            return "has_contrast"
        case ("in", values):
            return f"role in {tuple(values)!r}"
        case (sign, name, value):
            return f"{name} {sign} {value!r}"
    raise AssertionError


_LEAVES = st.one_of(
    st.tuples(
        st.sampled_from(["==", "!="]), st.just("role"), st.sampled_from(["frontal", "lateral", "other"])
    ),
    st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.just("size"), st.integers(-2, 2)),
    st.tuples(st.just("missing"), st.sampled_from(["role", "size", "has_contrast"])),
    st.tuples(st.just("has_contrast")),
    st.tuples(st.just("in"), st.lists(st.sampled_from(["frontal", "lateral"]), min_size=1, max_size=2)),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)
    ),
    max_leaves=8,
)
_ROWS = st.lists(
    st.tuples(
        st.integers(0, 2), st.none() | st.integers(-2, 2).map(float), st.sampled_from([None, True, False])
    ),
    min_size=1,
    max_size=12,
)


@given(_TREES, _ROWS)
def test_an_expression_selects_the_rows_for_which_it_is_true(tree: Any, rows: list[Any]) -> None:
    columns = _columns([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    expected = [
        _holds(tree, {"role": ROLES[role] or None, "size": size, "has_contrast": answer})
        for role, size, answer in rows
    ]
    selected = parse_expression(_text(tree), columns).select(columns, len(rows))
    assert selected.rows.tolist() == [value is True for value in expected]
    assert selected.num_missing == sum(value is None for value in expected)


def test_a_chain_of_comparisons_and_a_value_on_the_left() -> None:
    columns = _columns([1, 1, 1, 1], [0.0, 1.0, 2.0, None], [None] * 4)
    for text in ("0 < size <= 1", "0 < size and 1 >= size"):
        assert parse_expression(text, columns).select(columns, 4).rows.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("text", "sentence", "column"),
    [
        ("role = 'frontal'", "two equals signs", 5),
        ("role == 'a' && size > 1", "joined with `and`", 13),
        ("rol == 'a'", "Did you mean role".lower(), 0),
        ("role == 'Frontal'", "writes this value 'frontal'", 8),
        ("size == 'a'", "compared with a number", 8),
        ("role == 1", "compared with a string", 8),
        ("has_contrast == 1", "compared with True or False", 16),
        ("size", "compare it", 0),
        ("size is None", "followed by `missing`", 8),
        ("role in 'frontal'", "followed by values", 8),
        ("__import__('os').system('x')", "Expected comparisons", 0),
        ("size > size", "a column on one side", 7),
        ("[size for size in (1,)]", "Expected comparisons", 0),
        ("size > 2 ** 9", "Expected a value", 7),
        ("", "not an expression", 0),
        ("size >= 2 or", "not an expression", 0),
        ("role == frontal", "strings have quotes", 8),
        ("role in ('frontal')", "a comma too", 9),
        ("role == None", "is missing", 8),
    ],
)
def test_a_slip_is_answered_with_a_sentence_and_a_caret(text: str, sentence: str, column: int) -> None:
    columns = _columns([1], [1.0], [True])
    with pytest.raises(ConfigError) as caught:
        parse_expression(text, columns).select(columns, 1)
    first, _, rest = caught.value.message.partition("\n")
    assert sentence in first
    assert rest == f"  {text.strip()}\n  {' ' * column}^"


def test_an_endless_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most"):
        parse_expression(" or ".join(["size > 1"] * 1000), {"size"})
    with pytest.raises(ConfigError):
        parse_expression("not " * 500 + "has_contrast", {"has_contrast"})


def test_a_column_of_lists_of_numbers_is_refused_in_a_comparison_and_known_to_be_missing() -> None:
    columns = {"vector": _Column(np.ones((2, 3), np.float32), np.array([False, True]))}
    with pytest.raises(ConfigError, match="vector is a list of numbers"):
        parse_expression("vector > 1", columns).select(columns, 2)
    assert parse_expression("vector is missing", columns).select(columns, 2).rows.tolist() == [False, True]
