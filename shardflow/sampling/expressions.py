"""Expressions over the columns of tables: which rows to select, in the syntax of Python comparisons.

    role == 'frontal'                       a comparison: == != < <= > >=
    modality in ('CT', 'PT')                membership, also `not in`
    kernel is missing                       a value that the table does not have, also `is not missing`
    has_contrast and not (1 < thickness_mm <= 3)
    any(series.rows >= 512)                 of rows that have series: one of them; all(...): each of them

An expression is parsed with `ast` against a whitelist of nodes and never evaluated as Python. Logic has three
values, as in SQL: a comparison with a missing value is neither true nor false, nor is its negation, and a row
is selected only if the whole is true. `Selected.num_missing` counts the rows left out for that reason alone.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError

Literal: TypeAlias = str | int | float | bool
_Mask: TypeAlias = NDArray[np.bool_]
_MISSING: Final = "missing"
_SERIES: Final = "series."
_MAX_LISTED: Final = 40
_MAX_CHARACTERS: Final = 4096
_MAX_DEPTH: Final = 50
_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
)
_MIRRORED: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = MappingProxyType(
    {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}
)


class ExpressionColumn(Protocol):
    """Column of ``n`` rows that an expression may name."""

    @property
    def values(self) -> NDArray[Any]:
        """``(n,)`` numbers or booleans; with `names` integers that index them."""

    @property
    def is_missing(self) -> NDArray[np.bool_] | None:
        """``(n,)``, which rows have no value; None if every row has one."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Vocabulary of a column of strings; None for numbers and booleans."""

    @property
    def also(self) -> tuple[frozenset[str], ...] | None:
        """For each name, what else finds it by ``==`` and ``in``; None: nothing."""


@dataclass(frozen=True, slots=True)
class Selected:
    """Result of an expression for some rows."""

    rows: NDArray[np.bool_]
    """``(n,)``, whether the row is selected."""
    is_missing: NDArray[np.bool_]
    """``(n,)``, whether it is not selected because a value is missing."""

    @property
    def num_missing(self) -> int:
        """Rows that are not selected because a value is missing."""
        return int(np.count_nonzero(self.is_missing))


@dataclass(frozen=True, slots=True)
class Members:
    """Series of rows, over which ``any()`` and ``all()`` run."""

    columns: Mapping[str, ExpressionColumn]
    """The named columns of series, ``m`` long each."""
    owners: NDArray[np.integer[Any]]
    """``(m,)``, the row of each series."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Parsed expression.

    Attributes:
        text: As written.
        names: Columns that it names outside of ``any()`` and ``all()``.
        series_names: Columns of series that it names inside of them.
    """

    text: str
    names: frozenset[str]
    series_names: frozenset[str]
    _body: ast.expr

    def select(
        self, columns: Mapping[str, ExpressionColumn], num_rows: int, members: Members | None = None
    ) -> Selected:
        """Return the rows for which the expression is true.

        Args:
            columns: The named columns, ``num_rows`` long each.
            num_rows: Number of rows.
            members: The series of the rows; needed if there are ``series_names``.

        Raises:
            ConfigError: A column is compared with a value of another type.
        """
        is_true, is_known = _Evaluation(self.text, columns, num_rows, members).of(self._body)
        return Selected(is_true & is_known, ~is_known)


def parse_expression(text: str, known: Collection[str], series: Collection[str] = ()) -> Expression:
    """Parse an expression.

    Args:
        text: The expression, such as ``"role == 'frontal' and rows >= 512"``.
        known: Names of the columns that it may use.
        series: Names of columns of series, which it may use inside of ``any()`` and ``all()``.

    Raises:
        ConfigError: It is no expression of this grammar, or names an unknown column; the message points at
            the place and lists near names.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(
            f"An expression has at most {_MAX_CHARACTERS} characters, this one has {len(text)}; for long "
            "lists of values, attach them as a column."
        )
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = (error.offset or 1) - 1 if isinstance(error, SyntaxError) else 0
        raise _pointed(text.strip(), column, _HINTS.get(_slip(text), "This is not an expression")) from None
    check = _Check(text.strip(), known, series)
    check.node(body, depth=0)
    return Expression(text.strip(), frozenset(check.names), frozenset(check.series_names), body)


_HINTS: Final = {
    "=": "Comparisons are written with two equals signs, ==",
    "&&": "Conditions are joined with `and`",
    "||": "Conditions are joined with `or`",
}


def _slip(text: str) -> str:
    """Return the sign that a slip of habit begins with; empty if there is none."""
    found = re.search(r"&&|\|\||(?<![=!<>])=(?!=)", text)
    return "" if found is None else found[0]


class _Check:
    """Check of an expression against the whitelist of nodes, which collects the names of columns."""

    def __init__(self, text: str, known: Collection[str], series: Collection[str]) -> None:
        self._text, self._known, self._series = text, known, series
        self._is_inside = False
        self.names: set[str] = set()
        self.series_names: set[str] = set()

    def node(self, node: ast.expr, depth: int) -> None:
        """Refuse every node outside the whitelist."""
        if depth > _MAX_DEPTH:
            raise self._error(0, f"An expression nests at most {_MAX_DEPTH} levels")
        match node:
            case ast.BoolOp(values=values):
                for value in values:
                    self.node(value, depth + 1)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.node(operand, depth + 1)
            case ast.Compare():
                self._comparison(node)
            case ast.Call(func=ast.Name(id=("any" | "all")), args=[body], keywords=[]):
                self._quantifier(node, body, depth)
            case ast.Name() | ast.Attribute():
                self._name(node)
            case _:
                hint = "Expected comparisons of columns with values, joined by and, or, not"
                raise self._error(node.col_offset, hint)

    def _quantifier(self, node: ast.Call, body: ast.expr, depth: int) -> None:
        if not self._series:
            hint = (
                "any() and all() run over the series of a study; here a row has none, name columns directly"
            )
            raise self._error(node.col_offset, hint)
        if self._is_inside:
            raise self._error(node.col_offset, "any() and all() do not nest")
        self._is_inside = True
        self.node(body, depth + 1)
        self._is_inside = False

    def _comparison(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for place, sign in enumerate(node.ops):
            left, right = operands[place], operands[place + 1]
            if isinstance(sign, ast.Is | ast.IsNot):
                if not (isinstance(right, ast.Name) and right.id == _MISSING):
                    raise self._error(right.col_offset, "`is` is followed by `missing`; for values write ==")
                self._name(left)
            elif isinstance(sign, ast.In | ast.NotIn):
                self._name(left)
                if not isinstance(right, ast.Tuple | ast.List | ast.Set) or not right.elts:
                    hint = "('CT', 'MR'); one value has a comma too, ('CT',)"
                    raise self._error(right.col_offset, f"`in` is followed by values, such as {hint}")
                for element in right.elts:
                    _literal(element, self._text)
            else:
                columns = [one for one in (left, right) if isinstance(one, ast.Name | ast.Attribute)]
                if len(columns) != 1:
                    hint = (
                        "A comparison has a column on one side and a value on the other; strings have quotes"
                    )
                    raise self._error(right.col_offset, hint)
                if any(isinstance(one, ast.Constant) and one.value is None for one in (left, right)):
                    raise self._error(right.col_offset, "A missing value is asked for by `is missing`")
                self._name(columns[0])
                _literal(left if columns[0] is right else right, self._text)

    def _name(self, node: ast.expr) -> None:
        name = _name_of(node)
        if name is None:
            raise self._error(node.col_offset, "Expected the name of a column")
        known = self._series if self._is_inside else self._known
        if name not in known:
            raise self._error(node.col_offset, self._unknown(name, known))
        (self.series_names if self._is_inside else self.names).add(name)

    def _unknown(self, name: str, known: Collection[str]) -> str:
        of_series = name if name in self._series else _SERIES + name
        own = name.removeprefix(_SERIES)
        if self._is_inside and own in self._known:
            what = "series" if own == name else "images, but of the row itself"
            return f"{own} is not of {what}; write it outside of any() and all()"
        if not self._is_inside and of_series in self._series:
            own = f"facts.{name} of the study, or " if f"facts.{name}" in self._known else ""
            return f"A study has many series; write {own}any({of_series} ...) or all({of_series} ...)"
        # Whoever leaves out the table, or a part of the name, means a column that ends or begins so.
        short = name.rpartition(".")[2].casefold()
        parts = {one: one.rpartition(".")[2].casefold() for one in sorted(known)}
        near = [one for one, part in parts.items() if part == short]
        near = near or [one for one, part in parts.items() if part.startswith(f"{short}_")]
        near = near[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"There is no column {name!r}; did you mean {' or '.join(near)}?"
        listed = sorted(known)
        more = "" if len(listed) <= _MAX_LISTED else f" and {len(listed) - _MAX_LISTED} more"
        return f"There is no column {name!r}; there are {', '.join(listed[:_MAX_LISTED])}{more}"

    def _error(self, column: int, problem: str) -> ConfigError:
        return _pointed(self._text, column, problem)


def _name_of(node: ast.expr) -> str | None:
    """Return a dotted name; None if the node is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _name_of(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _literal(node: ast.expr, text: str) -> Literal:
    """Return the value of a literal: a string, a number, True or False."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
        if sign == 1:
            return node.value
        if not isinstance(node.value, str | bool):
            return -node.value
    raise _pointed(text, node.col_offset, "Expected a value: a string in quotes, a number, True or False")


def _pointed(text: str, column: int, problem: str) -> ConfigError:
    """Return an error with a caret under the place."""
    end = "" if problem.endswith("?") else "."
    return ConfigError(f"{problem}{end}\n  {text}\n  {' ' * max(column, 0)}^")


class _Evaluation:
    """Evaluation of an expression over some rows, in three-valued logic.

    Every node becomes two masks: whether it is true, and whether it is known.
    """

    def __init__(
        self,
        text: str,
        columns: Mapping[str, ExpressionColumn],
        num_rows: int,
        members: Members | None = None,
    ) -> None:
        self._text, self._columns, self._num_rows, self._members = text, columns, num_rows, members

    def of(self, node: ast.expr) -> tuple[_Mask, _Mask]:
        match node:
            case ast.BoolOp(op=op, values=values):
                return self._joined([self.of(value) for value in values], is_and=isinstance(op, ast.And))
            case ast.UnaryOp(operand=operand):
                is_true, is_known = self.of(operand)
                return ~is_true & is_known, is_known
            case ast.Compare():
                operands = [node.left, *node.comparators]
                found = [
                    self._compared(operands[place], sign, operands[place + 1])
                    for place, sign in enumerate(node.ops)
                ]
                return self._joined(found, is_and=True)
            case ast.Call(func=ast.Name(id=name), args=[body]) if self._members is not None:
                return self._over_members(self._members, body, is_all=name == "all")
            case _:
                column = self._column(node)
                if column.values.dtype != bool:
                    raise _pointed(
                        self._text,
                        node.col_offset,
                        f"{_name_of(node)} is not True or False; compare it",
                    )
                is_known = ~self._missing(column)
                return column.values & is_known, is_known

    def _over_members(self, members: Members, body: ast.expr, *, is_all: bool) -> tuple[_Mask, _Mask]:
        """Join the series of each row: one that is false decides `all`, one that is true decides `any`."""
        is_true, is_known = _Evaluation(self._text, members.columns, len(members.owners)).of(body)
        decides = is_known & (~is_true if is_all else is_true)
        decided = np.bincount(members.owners[decides], minlength=self._num_rows) > 0
        is_unknown = np.bincount(members.owners[~is_known], minlength=self._num_rows) > 0
        found_known = decided | ~is_unknown
        return (~decided if is_all else decided) & found_known, found_known

    @staticmethod
    def _joined(found: list[tuple[_Mask, _Mask]], *, is_and: bool) -> tuple[_Mask, _Mask]:
        """Join conditions: one that is false decides `and`, one that is true decides `or`."""
        is_true, is_known = found[0]
        for other_true, other_known in found[1:]:
            if is_and:
                decided = (is_known & ~is_true) | (other_known & ~other_true)
                is_true = is_true & other_true
            else:
                decided = (is_known & is_true) | (other_known & other_true)
                is_true = (is_known & is_true) | (other_known & other_true)
            is_known = decided | (is_known & other_known)
        return is_true & is_known, is_known

    def _compared(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> tuple[_Mask, _Mask]:
        if isinstance(sign, ast.Is | ast.IsNot):
            missing = self._missing(self._column(left))
            return (missing if isinstance(sign, ast.Is) else ~missing), np.ones(self._num_rows, bool)
        if not isinstance(left, ast.Name | ast.Attribute):
            left, sign, right = right, _MIRRORED[type(sign)](), left
        column, is_negated = self._column(left), isinstance(sign, ast.NotIn)
        is_known = ~self._missing(column)
        if isinstance(sign, ast.In | ast.NotIn):
            elements = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else []
            is_true = np.zeros(self._num_rows, bool)
            for element in elements:
                is_true |= self._against(left, column, operator.eq, element)
        else:
            is_true = self._against(left, column, _COMPARISONS[type(sign)], right)
        return (is_true != is_negated) & is_known, is_known

    def _against(
        self, name: ast.expr, column: ExpressionColumn, compare: Callable[[Any, Any], Any], node: ast.expr
    ) -> _Mask:
        """Compare the values of a column with a literal; rows without a value are arbitrary."""
        value = _literal(node, self._text)
        if column.values.ndim > 1:
            raise _pointed(
                self._text,
                name.col_offset,
                f"{_name_of(name)} is a list of numbers; only `is missing` asks for it",
            )
        if column.values.dtype.kind == "S":  # surrogates, too many for a vocabulary
            if not isinstance(value, str):
                raise self._mismatch(name, node, "a string")
            return np.asarray(compare(column.values, value.encode("utf-8")), bool)
        wanted = "a string" if column.names is not None else "True or False"
        if column.names is not None:
            if not isinstance(value, str):
                raise self._mismatch(name, node, wanted)
            holds = np.array([compare(known, value) for known in column.names], bool)
            if column.also is not None and compare in (operator.eq, operator.ne):
                found_by = np.array([value in one for one in column.also], bool)
                holds = holds | found_by if compare is operator.eq else holds & ~found_by
            if compare is operator.eq and not holds.any():
                self._check_spelling(value, column.names, node)
            found: _Mask = np.append(holds, False)[np.minimum(column.values, len(holds))]
            return found
        if column.values.dtype == bool:
            if not isinstance(value, bool):
                raise self._mismatch(name, node, wanted)
        elif isinstance(value, str | bool):
            raise self._mismatch(name, node, "a number")
        return np.asarray(compare(column.values, value), bool)

    def _check_spelling(self, value: str, names: tuple[str, ...], node: ast.expr) -> None:
        """Refuse a value that differs from a known one by case alone: it would select nothing."""
        for known in names:
            if known.casefold() == value.casefold():
                raise _pointed(self._text, node.col_offset, f"The column writes this value {known!r}")

    def _missing(self, column: ExpressionColumn) -> _Mask:
        return np.zeros(self._num_rows, bool) if column.is_missing is None else column.is_missing

    def _column(self, node: ast.expr) -> ExpressionColumn:
        return self._columns[_name_of(node) or ""]

    def _mismatch(self, name: ast.expr, node: ast.expr, wanted: str) -> ConfigError:
        return _pointed(self._text, node.col_offset, f"The column {_name_of(name)} is compared with {wanted}")
