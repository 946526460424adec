"""Django's validation errors as DomainErrors."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db.models import Model

from dstackweb.lib.errors import FieldError, Invalid


def check(row: Model, *fields: str) -> None:
    """Validate these fields of an unsaved row; raises Invalid with an error for each.

    Uniqueness is left to the database: only there it can be checked without a race.
    """
    others = {field.name for field in row._meta.get_fields()} - set(fields)
    try:
        row.clean_fields(exclude=others)
    except ValidationError as error:
        raise invalid(list(field_errors(error))) from None


def field_errors(error: ValidationError, field: str = "") -> Iterator[FieldError]:
    """The messages of a ValidationError with their fields; a message without a field gets `field`."""
    by_field = error.message_dict if hasattr(error, "error_dict") else {field: error.messages}
    for name, messages in by_field.items():
        loc: list[str | int] = [name] if name and name != NON_FIELD_ERRORS else []
        for message in messages:
            yield {"loc": loc, "line": None, "msg": message}


def invalid(errors: list[FieldError]) -> Invalid:
    """An Invalid with several field errors; its text names each field."""
    return Invalid(" ".join(": ".join([*map(str, e["loc"]), e["msg"]]) for e in errors), errors)
