"""Users, projects and memberships, and what signs users in: API tokens, invites and one-time links.

No secret is stored in plain text: tokens, links and keys of sessions are hashed with SHA-256, secrets of projects are
encrypted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib.auth.models import AbstractUser
from django.contrib.sessions.base_session import AbstractBaseSession
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

SECRET_NAME = RegexValidator(
    r"^[A-Za-z_][A-Za-z0-9_]*\Z",
    gettext_lazy("Use letters, digits and underscores, with no digit first, such as HF_TOKEN."),
)
# The name of the API token that DSTACKWEB_ADMIN_TOKEN sets; no other token has it.
ENVIRONMENT = "environment"


def not_the_environments(name: str) -> None:
    """Refuse the name of the environment's token, which is created and revoked with the variable's value."""
    if name == ENVIRONMENT:
        raise ValidationError(_("This name is reserved for the token in DSTACKWEB_ADMIN_TOKEN."))


class Role(models.TextChoices):
    """Roles in a project, least first: each role includes the ones before it."""

    VIEWER = "viewer", gettext_lazy("viewer")
    MEMBER = "member", gettext_lazy("member")
    MANAGER = "manager", gettext_lazy("manager")
    ADMIN = "admin", gettext_lazy("admin")


class TokenScope(models.TextChoices):
    """What a token may do at most, whatever its user may: as viewers, members, managers, or all."""

    READ = "read", gettext_lazy("read")
    SUBMIT = "submit", gettext_lazy("read and submit")
    MANAGE = "manage", gettext_lazy("read, submit and manage")
    ADMIN = "admin", gettext_lazy("everything")

    @property
    def role(self) -> Role:
        """The highest role that it allows."""
        return dict(zip(TokenScope, Role, strict=True))[self]


class TokenLimit(NamedTuple):
    """The limits of the API token that a user is signed in with: a scope, and a project's id or None for all."""

    scope: TokenScope
    project_id: int | None


class User(AbstractUser):
    """A person who signs in. A superuser is a deployment admin, and an admin of every project.

    `token_limit` is of the API token that this object was signed in with; None: a session.
    """

    time_zone = models.CharField(max_length=60, blank=True, help_text="Such as Europe/Berlin. Empty: the browser's.")
    language = models.CharField(max_length=10, blank=True, help_text="Such as zh-hans. Empty: the browser's.")

    token_limit: TokenLimit | None = None
    token_name = ""

    @property
    def may_administer(self) -> bool:
        """Whether they may manage the deployment now: superusers, unless their token is limited."""
        unlimited = self.token_limit in (None, TokenLimit(TokenScope.ADMIN, None))
        return self.is_superuser and unlimited


class Project(models.Model):
    """A team's space: members with roles, runs, queues, a weight and a budget."""

    name = models.SlugField(max_length=60, unique=True)
    weight = models.PositiveIntegerField(
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(1000)],
        help_text="Share of the capacity relative to other projects: 2 gets twice as many GPUs as 1.",
    )
    monthly_budget = models.DecimalField(
        max_digits=12,
        decimal_places=2,
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="USD per month for paid backends. Empty for no limit.",
    )
    member_max_priority = models.PositiveSmallIntegerField(
        default=80,
        validators=[MaxValueValidator(100)],
        help_text="Highest priority (0–100) that members can set. Managers can set any.",
    )
    least_isolation = models.CharField(
        max_length=10,
        blank=True,
        choices=[
            ("user", gettext_lazy("another user than the server's")),
            ("project", gettext_lazy("a user of the project's own")),
            ("sandbox", gettext_lazy("a sandbox")),
            ("container", gettext_lazy("a container")),
        ],
        help_text="How hosts must isolate its jobs at least. Cloud instances run jobs of one project only.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    deleting_since = models.DateTimeField(
        null=True,
        editable=False,
        help_text="It is hidden from its members since then, while its runs are removed",
    )

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(weight__gte=1), name="project_weight_at_least_1"),
            models.CheckConstraint(condition=Q(member_max_priority__lte=100), name="project_max_priority_0_to_100"),
            models.CheckConstraint(
                condition=Q(monthly_budget__isnull=True) | Q(monthly_budget__gte=0), name="project_budget_not_negative"
            ),
        ]
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """A user's role in a project."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.MEMBER)
    by_group = models.BooleanField(
        default=False, help_text="Given by a group at single sign-on, which takes it back, and not by hand."
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "project"], name="membership_once_in_project"),
            models.CheckConstraint(condition=Q(role__in=Role.values), name="membership_role_known"),
        ]
        ordering = ["project", "user"]

    def __str__(self) -> str:
        return f"{self.project}: {self.user}"


class ApiToken(models.Model):
    """A bearer token for the API and the CLI. Only its digest is stored; `hint` identifies it to its owner.

    It has the permissions of its user, at most those of `scope`, and in `project` alone if there is one.
    """

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=80, validators=[not_the_environments], help_text="Where it is used: laptop, CI")
    digest = models.CharField(max_length=64, unique=True, editable=False)
    hint = models.CharField(max_length=12, editable=False, help_text="Last characters of the token")
    scope = models.CharField(max_length=10, choices=TokenScope.choices, default=TokenScope.ADMIN)
    project = models.ForeignKey(
        Project, null=True, blank=True, on_delete=models.CASCADE, related_name="+", help_text="Empty for all projects"
    )
    expires_at = models.DateTimeField(null=True, blank=True, help_text="Empty for never")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    last_used_at = models.DateTimeField(null=True, editable=False, help_text="Accurate to one minute")
    revoked_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(scope__in=TokenScope.values), name="token_scope_known")]
        ordering = ["-created_at", "-id"]
        verbose_name = "API token"

    def __str__(self) -> str:
        return f"{self.user}: {self.name}"


class SSHKey(models.Model):
    """A public key with which its user connects to their dev environments. Several users may have the same one."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="ssh_keys")
    name = models.CharField(max_length=80, help_text="Where it is used: laptop, desktop")
    public_key = models.TextField(help_text="As in an authorized_keys file, without options and comment")
    fingerprint = models.CharField(max_length=60, db_index=True, editable=False, help_text="SHA256:…")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    last_used_at = models.DateTimeField(null=True, editable=False, help_text="Accurate to one minute")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "fingerprint"], name="ssh_key_once_of_user")]
        ordering = ["name", "id"]
        verbose_name = "SSH key"

    def __str__(self) -> str:
        return f"{self.user}: {self.name}"


class Invite(models.Model):
    """A single-use link that adds a user to a project with a role, until it expires."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="invites")
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.MEMBER)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    created_by = models.ForeignKey(User, on_delete=models.CASCADE, related_name="invites_sent")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField()
    used_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="invites_used")
    used_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(role__in=Role.values), name="invite_role_known")]
        ordering = ["-created_at", "-id"]

    def __str__(self) -> str:
        return f"{self.project}: {self.created_by}, {self.created_at:%Y-%m-%d %H:%M} UTC"


class LoginLink(models.Model):
    """A single-use link that signs its user in, until it expires."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="login_links")
    digest = models.CharField(max_length=64, unique=True, editable=False)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-expires_at", "-id"]

    def __str__(self) -> str:
        return f"{self.user}, {self.expires_at:%Y-%m-%d %H:%M} UTC"


class AddressFailures(models.Model):
    """How many wrong passwords and tokens came from an address in one window of time (`attempts`)."""

    address = models.CharField(max_length=64)
    window = models.PositiveBigIntegerField(db_index=True)
    count = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["address", "window"], name="failures_of_address_once")]
        verbose_name_plural = "address failures"

    def __str__(self) -> str:
        return f"{self.address}: {self.count}"


class PasswordFailures(models.Model):
    """Wrong passwords for a name from one network since its last sign-in there (`attempts`)."""

    name = models.CharField(max_length=150)
    network = models.CharField(max_length=64)
    count = models.PositiveIntegerField(default=0)
    last_at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["name", "network"], name="failures_of_name_once")]
        verbose_name_plural = "password failures"

    def __str__(self) -> str:
        return f"{self.name} {self.network}: {self.count}"


class Session(AbstractBaseSession):
    """A browser's session, by a digest of the key in its cookie; `user` is null until it signs in.

    It ends at `expire_date`, which each use puts off.
    """

    user = models.ForeignKey(User, null=True, on_delete=models.CASCADE, related_name="sessions")

    @classmethod
    def get_session_store_class(cls) -> Any:
        from dstackweb.accounts.sessions import SessionStore

        return SessionStore


class ProjectSecret(models.Model):
    """A value that runs read as `${{ secrets.NAME }}`. Users can set it but not read it."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="secrets")
    name = models.CharField(max_length=120, validators=[SECRET_NAME])
    ciphertext = models.TextField(editable=False)
    updated_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+", editable=False)
    updated_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "name"], name="secret_name_in_project")]
        ordering = ["project", "name"]

    def __str__(self) -> str:
        return f"{self.project}: {self.name}"


class SavedView(models.Model):
    """Filters of a project's queues under a name, as the query of the page's address (`q=sweep&group=reason`).

    Only `user` sees it; without one, all members of the project.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="saved_views")
    user = models.ForeignKey(User, null=True, blank=True, on_delete=models.CASCADE, related_name="saved_views")
    name = models.CharField(max_length=40)
    query = models.CharField(max_length=500)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "user", "name"], name="view_name_of_user_in_project"),
            models.UniqueConstraint(
                fields=["project", "name"], condition=Q(user=None), name="shared_view_name_in_project"
            ),
        ]
        ordering = ["name"]

    def __str__(self) -> str:
        return f"{self.user or self.project}: {self.name}"


class DefaultView(models.Model):
    """The view with which the queue pages of a project begin for a person: one of their own, or a shared one."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    view = models.ForeignKey(SavedView, on_delete=models.CASCADE, related_name="defaults")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "project"], name="default_view_once")]

    def __str__(self) -> str:
        return f"{self.project}: {self.user}, {self.view.name}"
