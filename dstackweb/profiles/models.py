"""Profiles. Runs store their effective settings: editing or deleting a profile changes no submitted run."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.spec.run_file import parse_profile_settings

NAME = RegexValidator(
    r"^[a-z][a-z0-9-]*\Z", gettext_lazy("Use lower-case letters, digits and dashes, with a letter first.")
)


class Profile(models.Model):
    """Named defaults for runs of one project, or of all projects (`project` is null)."""

    project = models.ForeignKey(
        Project,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="profiles",
        help_text="Empty for all projects. A project's own profile takes precedence over one with the same name.",
    )
    name = models.CharField(max_length=60, validators=[NAME])
    is_default = models.BooleanField(
        "default",
        default=False,
        help_text="Used by runs that name no profile. A project's own default takes precedence.",
    )
    settings: models.JSONField[Any, Any] = models.JSONField(default=dict, blank=True, help_text="Keys of the run file")
    description = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", "name"],
                name="profile_name_once_in_project",
                violation_error_message="The project already has a profile with this name.",
            ),
            models.UniqueConstraint(
                fields=["name"],
                condition=Q(project__isnull=True),
                name="profile_name_once_for_all_projects",
                violation_error_message="A profile with this name for all projects already exists.",
            ),
            # Null values are distinct in a unique index, so profiles for all projects need constraints of their own.
            models.UniqueConstraint(
                fields=["project"],
                condition=Q(is_default=True),
                name="profile_one_default_in_project",
                violation_error_message="The project has a default profile already. Change it with the action.",
            ),
            models.UniqueConstraint(
                fields=["is_default"],
                condition=Q(is_default=True, project__isnull=True),
                name="profile_one_default_for_all_projects",
                violation_error_message="All projects have a default profile already. Change it with the action.",
            ),
        ]
        ordering = ["name", "project"]

    def __str__(self) -> str:
        return f"{self.project}/{self.name}" if self.project else self.name

    def clean(self) -> None:
        """Validate the settings. Raises ValidationError for the field."""
        super().clean()
        try:
            parse_profile_settings(self.settings)
        except Invalid as error:
            raise ValidationError({"settings": [item["msg"] for item in error.errors]}) from None
        except DomainError as error:
            raise ValidationError({"settings": error.detail}) from None
