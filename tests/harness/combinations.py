# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tables of options, and few rows that together have every pair of values of two options, or each combination of more.
An option has named values; the first one is the default. A row has one value of each option. Values that cannot be
combined are listed with the reason. Pure: tables are read when tests are collected."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import covertable

Row = dict[str, str]  # option -> name of a value
Values = tuple[tuple[str, str], ...]  # (option, name of a value), of some options


class Option(NamedTuple):
    """An option of a table."""

    name: str
    values: dict[str, dict[str, Any]]  # the changes of each value; the first is the default

    @property
    def default(self) -> str:
        return next(iter(self.values))


class Excluded(NamedTuple):
    """Values that no row has together."""

    together: dict[str, tuple[str, ...]]  # option -> its values
    # With which they cannot be; others have rows of their own. None: with none.
    strategies: tuple[str, ...] | None = None

    @property
    def of_several(self) -> bool:
        """Whether it is about several options; a value of one is left out by ``Table.with_strategy`` alone."""
        return len(self.together) > 1

    def found(self, row: Mapping[str, str]) -> bool:
        return all(row.get(name) in values for name, values in self.together.items())


class Table(NamedTuple):
    """Options, and the combinations that are excluded."""

    options: tuple[Option, ...]
    excluded: tuple[Excluded, ...]

    def row(self, values: Mapping[str, str]) -> Row:
        return {option.name: values.get(option.name, option.default) for option in self.options}

    def everything(self) -> Row:
        """Return the row in which each option has its last value that those before it leave possible."""
        row: Row = {}
        for option in self.options:
            row[option.name] = next(v for v in reversed(option.values) if self.possible({**row, option.name: v}))
        return row

    def possible(self, row: Mapping[str, str]) -> bool:
        return not any(item.found(row) for item in self.excluded if item.of_several)

    def rows(self, strength: int = 2, salt: str = "") -> list[Row]:
        """Return a covering array with the row that has everything, then one for each exclusion that concerns some
        strategies: there, the others run the excluded values with each value of another option. Always the same."""
        more = {"strength": strength, "presets": [self.everything()]}
        several = [item for item in self.excluded if item.of_several]
        results = self._array(several, {}, salt, more)
        for item in several:
            if item.strategies is not None:
                alternatives = [other for other in several if other is not item]
                results += self._array(alternatives, item.together, salt, {"strength": 1})
        return results

    def _array(
        self, excluded: Iterable[Excluded], fixed: Mapping[str, Sequence[str]], salt: str, more: dict[str, Any]
    ) -> list[Row]:
        values = {option.name: list(fixed.get(option.name, option.values)) for option in self.options}
        return covertable.make(values, constraints=[_condition(item.together) for item in excluded], salt=salt, **more)

    def with_strategy(self, row: Row, strategy: str) -> Row:
        """Return a row as a strategy runs it: options that it does not support have their defaults."""
        results = [item for item in self.excluded if strategy in (item.strategies or ()) and item.found(row)]
        unsupported = {list(item.together)[-1] for item in results}
        return {**row, **self.row({name: row[name] for name in row if name not in unsupported})}

    def missing(self, rows: Iterable[Row], strategy: str, strength: int = 2) -> list[Values]:
        """Return which values of two options, or more, a strategy does not meet together, though it could."""
        options = {option.name: option for option in self.options}
        run = [self.with_strategy(row, strategy) for row in rows]
        excluded = [item for item in self.excluded if item.strategies is None or strategy in item.strategies]
        return [
            values
            for names in itertools.combinations(options, strength)
            for values in _not_met([options[name] for name in names], run)
            if not any(item.found(dict(values)) for item in excluded)
        ]


def _condition(together: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    each = [{"operator": "in", "left": name, "values": list(values)} for name, values in together.items()]
    return {"operator": "not", "condition": {"operator": "and", "conditions": each}}


def _not_met(options: Sequence[Option], rows: Sequence[Row]) -> Iterator[Values]:
    met = {tuple(row[option.name] for option in options) for row in rows}
    for names in itertools.product(*(option.values for option in options)):
        if names not in met:
            yield tuple((option.name, name) for option, name in zip(options, names, strict=True))
