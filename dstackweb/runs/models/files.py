"""Artifacts of runs, and what they and logs count for."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import models
from django.db.models import F
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.runs.models.base import count_field
from dstackweb.runs.models.jobs import Job
from dstackweb.runs.models.runs import Run


class _ProjectBytes(models.Model):
    """What files of one kind of a project take."""

    project = models.OneToOneField("accounts.Project", on_delete=models.CASCADE, primary_key=True, related_name="+")
    bytes = models.BigIntegerField(default=0)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.project}: {self.bytes} bytes"

    @classmethod
    def used(cls, project: Project) -> int:
        """What they count as, in bytes."""
        return cls._default_manager.filter(pk=project.pk).values_list("bytes", flat=True).first() or 0

    @classmethod
    def take(cls, project_id: int, size: int, most: int) -> bool:
        """Count `size` bytes more, unless that makes more than `most`; whether it was done. The row is there."""
        return bool(cls._default_manager.filter(pk=project_id, bytes__lte=most - size).update(bytes=F("bytes") + size))

    @classmethod
    def uncount(cls, freed: Mapping[int, int]) -> None:
        """Take bytes, by project, out of the counts. Call inside a transaction that has locked what they are of."""
        for project_id, size in sorted(freed.items()):
            if size:
                cls._default_manager.filter(pk=project_id).update(bytes=F("bytes") - size)


class ProjectLogs(_ProjectBytes):
    """The sum of `log_counted` of its jobs."""


class Artifact(models.Model):
    """A file that a job left in its artifacts directory. It is there once `stored_at` is set; it counts from before."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="artifacts")
    path = models.CharField(max_length=512)
    size = models.BigIntegerField(help_text="Bytes")
    sha256 = models.CharField(max_length=64)
    key = models.CharField(max_length=100, help_text="Its file in the storage")
    content_type = models.CharField(max_length=100, help_text="As guessed from its name")
    created_at = models.DateTimeField(default=timezone.now)
    stored_at = models.DateTimeField(null=True, help_text="When all of it had arrived")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "path"], name="artifact_once_in_job")]
        # The ones to prune, oldest first.
        indexes = [models.Index("created_at", name="artifact_by_age")]

    def __str__(self) -> str:
        return f"{self.job}: {self.path}"

    @property
    def name(self) -> str:
        """Without its folders."""
        return self.path.rpartition("/")[2]


class RunArtifacts(models.Model):
    """How many artifacts a run has, and what they take. The row stays when they were removed because they were old."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="artifacts")
    files = count_field()
    bytes = models.BigIntegerField(default=0)
    removed_at = models.DateTimeField(null=True, help_text="When old ones were removed")

    def __str__(self) -> str:
        return f"{self.run}: {self.files} files, {self.bytes} bytes"


class ProjectArtifacts(_ProjectBytes):
    """The sum of the sizes of its artifacts."""
