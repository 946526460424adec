"""Project secrets: members set them, runs read them, and they are never shown."""

from __future__ import annotations

from django.utils import timezone

from dstackweb.accounts.models import Project, ProjectSecret, User
from dstackweb.accounts.services.checks import check
from dstackweb.lib.errors import Conflict, DomainError, Invalid, NotFound
from dstackweb.lib.secrets import decrypt, encrypt

VALUE_LIMIT = 64 * 1024


def check_value(value: str) -> None:
    """Raise Invalid unless an environment variable can have the value: up to 64 KiB in UTF-8, no NUL, not empty."""
    if not value:
        raise Invalid.at("value", msg="The value is empty.")
    if "\0" in value:
        raise Invalid.at("value", msg="The value can't contain NUL characters.")
    if len(value.encode()) > VALUE_LIMIT:
        raise Invalid.at("value", msg="The value is larger than 64 KiB.")


def set_secret(project: Project, name: str, value: str, by: User) -> ProjectSecret:
    """Create a secret or replace its value. Raises Invalid at `name` or `value`."""
    check(ProjectSecret(project=project, name=name), "name")
    check_value(value)
    row, _ = ProjectSecret.objects.update_or_create(
        project=project,
        name=name,
        defaults={"ciphertext": encrypt(value), "updated_by": by, "updated_at": timezone.now()},
    )
    return row


def delete_secret(project: Project, name: str) -> None:
    """Delete a secret. Raises NotFound if there is none of this name."""
    deleted, _ = ProjectSecret.objects.filter(project=project, name=name).delete()
    if not deleted:
        raise NotFound(f"{project} has no secret {name}.")


def secret_names(project: Project) -> list[str]:
    """The names of the project's secrets, sorted."""
    return list(ProjectSecret.objects.filter(project=project).order_by("name").values_list("name", flat=True))


def secret_values(project: Project) -> dict[str, str]:
    """All secrets in plain text by name, for a run's environment and for masking its log; never for a page.

    Raises Conflict for a secret that was encrypted with another secret key.
    """
    values = {}
    for row in ProjectSecret.objects.filter(project=project):
        try:
            values[row.name] = decrypt(row.ciphertext)
        except DomainError:
            raise Conflict(
                f"The secret {row.name} of {project} was encrypted with another secret key. Set it again."
            ) from None
    return values
