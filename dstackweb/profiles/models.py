"""Profiles as rows. A run keeps what it resolved to, so that editing or deleting one changes no run."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.spec.run_file import parse_profile_settings

NAME = RegexValidator(r"^[a-z][a-z0-9-]*\Z", "Lower-case letters, digits and dashes, with a letter first.")


class Profile(models.Model):
    """A named set of defaults for runs, of one project or (`project` null) of all."""

    project = models.ForeignKey(
        Project,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="profiles",
        help_text="Empty: for all projects. A project's own profile comes before one of all with the same name.",
    )
    name = models.CharField(max_length=60, validators=[NAME])
    is_default = models.BooleanField(
        "default",
        default=False,
        help_text="Used by runs that name no profile. A project's own comes before that of all.",
    )
    settings: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Keys of the run file, in its notation"
    )
    description = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", "name"],
                name="profile_name_once_in_project",
                violation_error_message="The project already has a profile of this name.",
            ),
            models.UniqueConstraint(
                fields=["name"],
                condition=Q(project__isnull=True),
                name="profile_name_once_for_all_projects",
                violation_error_message="There already is a profile of this name for all projects.",
            ),
            # A null project equals no other in an index, so "for all projects" needs constraints of its own.
            models.UniqueConstraint(
                fields=["project"],
                condition=Q(is_default=True),
                name="profile_one_default_in_project",
                violation_error_message="The project already has a default profile: the list's action changes it.",
            ),
            models.UniqueConstraint(
                fields=["is_default"],
                condition=Q(is_default=True, project__isnull=True),
                name="profile_one_default_for_all_projects",
                violation_error_message="All projects already have a default profile: the list's action changes it.",
            ),
        ]
        ordering = ["name", "project"]

    def __str__(self) -> str:
        return f"{self.project}/{self.name}" if self.project else self.name

    def clean(self) -> None:
        """Refuse settings that no run could use. Raises ValidationError beside the field."""
        super().clean()
        try:
            parse_profile_settings(self.settings)
        except Invalid as error:
            raise ValidationError({"settings": [item["msg"] for item in error.errors]}) from None
        except DomainError as error:
            raise ValidationError({"settings": error.detail}) from None
