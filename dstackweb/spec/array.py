"""The `array` key: one file that makes many runs, each with an index from 0 and parameters in its environment. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dstackweb.lib.language import gettext as _, gettext_noop
from dstackweb.spec.env import EnvError, check_sizes, read_env
from dstackweb.spec.fields import Keys, optional

MOST_RUNS = 100_000
MOST_PARAMETERS = 50
Parameters = dict[str, str]


def _parameters(value: Any) -> Any:
    """Text by name. Raises EnvError."""
    if isinstance(value, dict):
        _check_number(len(value))
        return read_env(value)
    raise ValueError(_("should be a mapping such as {LR: 0.1}"))


def _check_number(parameters: int) -> None:
    if not 0 < parameters <= MOST_PARAMETERS:
        raise ValueError(_("give 1 to %(most_parameters)s parameters") % {"most_parameters": MOST_PARAMETERS})


def _matrix(value: Any) -> Any:
    """The values of each parameter as text. Raises EnvError."""
    if not isinstance(value, dict):
        return value
    _check_number(len(value))
    found: dict[str, tuple[str, ...]] = {}
    for name, values in value.items():
        if not isinstance(values, list | tuple) or not values:
            raise EnvError(name, _("should be a list of at least one value"))
        found[name] = tuple(text for each in values for text in read_env({name: each}).values())
    return found


Item = Annotated[Parameters, BeforeValidator(_parameters)]


class ArrayFields(Keys):
    """What makes a sweep of a run file: a number of runs, all combinations of values, or a list of parameters."""

    count: Annotated[int, Field(strict=True, ge=1)] | None = optional(
        gettext_noop("a whole number of at least 1"), "So many runs, which differ in their index only."
    )
    matrix: Annotated[dict[str, tuple[str, ...]], BeforeValidator(_matrix)] | None = optional(
        gettext_noop("a mapping such as {LR: [0.1, 0.01], SEED: [1, 2]}"),
        "A run for each combination of the values. The last parameter changes first.",
    )
    list: Annotated[tuple[Item, ...], Field(min_length=1)] | None = optional(
        gettext_noop("a list of mappings such as {LR: 0.1}"), "A run for each item, with its parameters."
    )
    max_parallel: Annotated[int, Field(strict=True, ge=1)] | None = optional(
        gettext_noop("a whole number of at least 1"),
        "How many of the runs are queued or placed at once. No limit if empty.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("count", "matrix", "list") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(_("give exactly one of `count`, `matrix` and `list`"))
        if (size := Array.of(self).size) > MOST_RUNS:
            raise ValueError(
                _("%(size)s runs are more than %(most_runs)s") % {"size": f"{size:,}", "most_runs": f"{MOST_RUNS:,}"}
            )
        return self


def read_array(value: Any) -> Any:
    """A number alone is the number of runs."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if value < 1:
        raise ValueError(_("it makes no run"))
    return {"count": value}


class Array(BaseModel):
    """The runs of a sweep, which are numbered from 0. It keeps the order of parameters through any JSON.

    Either `count`, or `matrix` with the values of each parameter, or `rows` with one value for each of `names`, where
    None means that a run lacks the parameter.
    """

    model_config = ConfigDict(frozen=True)

    count: int | None = None
    matrix: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    names: tuple[str, ...] = ()
    rows: tuple[tuple[str | None, ...], ...] | None = None
    max_parallel: int | None = None

    @classmethod
    def of(cls, fields: ArrayFields) -> Array:
        if fields.matrix is not None:
            names = tuple(fields.matrix)
            return cls(matrix=tuple(fields.matrix.items()), names=names, max_parallel=fields.max_parallel)
        names = tuple(dict.fromkeys(name for item in fields.list or () for name in item))
        rows = tuple(tuple(item.get(name) for name in names) for item in fields.list) if fields.list else None
        return cls(count=fields.count, names=names, rows=rows, max_parallel=fields.max_parallel)

    @property
    def size(self) -> int:
        """How many runs it makes."""
        if self.matrix is not None:
            return prod(len(values) for _name, values in self.matrix)
        return len(self.rows) if self.rows is not None else self.count or 0

    def parameters(self, index: int) -> Parameters:
        """The parameters of one run, by name, in the order of the file. Raises IndexError."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        if self.matrix is not None:
            steps = accumulate((len(values) for _name, values in reversed(self.matrix)), int.__mul__, initial=1)
            sized = zip(self.matrix, reversed([*steps][:-1]), strict=True)
            return {name: values[index // step % len(values)] for (name, values), step in sized}
        row = self.rows[index] if self.rows is not None else ()
        return {name: value for name, value in zip(self.names, row, strict=True) if value is not None}

    def check_env(self, env: Mapping[str, str]) -> None:
        """Raises EnvError where this environment would be too large with the longest parameters."""
        check_sizes({**env, **dict(self._longest())})

    def _longest(self) -> Iterator[tuple[str, str]]:
        for number, name in enumerate(self.names):
            if self.matrix is not None:
                yield name, max(self.matrix[number][1], key=len)
            else:
                yield name, max((row[number] or "" for row in self.rows or ()), key=len)

    def as_file(self) -> dict[str, Any]:
        """The same as the run file's `array`."""
        shown: dict[str, Any] = {"count": self.count} if self.count is not None else {}
        if self.matrix is not None:
            shown["matrix"] = {name: list(values) for name, values in self.matrix}
        if self.rows is not None:
            shown["list"] = [self.parameters(index) for index in range(len(self.rows))]
        return shown | ({} if self.max_parallel is None else {"max_parallel": self.max_parallel})
