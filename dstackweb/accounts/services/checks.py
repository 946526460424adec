"""Django's validation, told as the product's own errors."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db.models import Model

from dstackweb.lib.errors import FieldError, Invalid


def check(row: Model, *fields: str) -> None:
    """Validate only these fields of an unsaved row; raises Invalid with one error per fault, at its field.

    Uniqueness is left to the database, which alone can judge it without a race.
    """
    others = {field.name for field in row._meta.get_fields()} - set(fields)
    try:
        row.clean_fields(exclude=others)
    except ValidationError as error:
        raise invalid(list(field_errors(error))) from None


def field_errors(error: ValidationError, field: str = "") -> Iterator[FieldError]:
    """Each message of a ValidationError with its place; one that knows no field is put at `field`."""
    by_field = error.message_dict if hasattr(error, "error_dict") else {field: error.messages}
    for name, messages in by_field.items():
        loc: list[str | int] = [name] if name and name != NON_FIELD_ERRORS else []
        for message in messages:
            yield {"loc": loc, "line": None, "msg": message}


def invalid(errors: list[FieldError]) -> Invalid:
    """One Invalid of several field errors; its sentence names each field."""
    return Invalid(" ".join(": ".join([*map(str, e["loc"]), e["msg"]]) for e in errors), errors)
