"""The areas of the admin site: its models by what admins do. Pure data; a test finds each registered model in it."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.utils.translation import gettext_lazy as _


class Entry(NamedTuple):
    """A model by its label (`app.model`), with one line of help. `name` stands for the model's own name in lists."""

    model: str
    help: Any
    name: Any = ""


class Area(NamedTuple):
    """Models that belong together. In a `fixed` one nothing can be added, changed or deleted."""

    key: str
    label: Any
    help: Any
    icon: str
    entries: tuple[Entry, ...]
    fixed: bool = False


AREAS = (
    Area(
        "people",
        _("People and access"),
        _("Who may sign in, and with what."),
        "members",
        (
            Entry("accounts.user", _("Accounts, passwords and two-step sign-in.")),
            Entry("accounts.apitoken", _("For programs and the command line. Revoke lost ones here."), _("API tokens")),
            Entry("accounts.invite", _("Links that let one person into a project.")),
            Entry("accounts.sshkey", _("What people enter dev environments with."), _("SSH keys")),
            Entry("accounts.loginlink", _("Links that sign in once."), _("Sign-in links")),
            Entry("auth.group", _("Permissions for staff who are not deployment admins."), _("Staff groups")),
            Entry(
                "axes.accessattempt",
                _("Failed sign-ins by user and address. Delete a row to let them try again."),
                _("Failed sign-ins"),
            ),
            Entry(
                "accounts.addressfailures",
                _("Addresses with many failed attempts. Delete a row to let one try again."),
                _("Blocked addresses"),
            ),
        ),
    ),
    Area(
        "projects",
        _("Projects and queues"),
        _("What teams share, and in which order they get it."),
        "queue",
        (
            Entry("accounts.project", _("Teams, with their weight, budget and members.")),
            Entry("accounts.membership", _("Who is in which project, and with which role.")),
            Entry("runs.queue", _("Order, limits, fair share and preemption.")),
            Entry("runs.run", _("All runs. The priority of active ones can be changed.")),
            Entry("runs.sweep", _("Many runs of one file.")),
            Entry("accounts.projectsecret", _("Values that run files name; stored encrypted."), _("Secrets")),
            Entry("accounts.savedview", _("Filters of the queue that people saved.")),
            Entry("accounts.defaultview", _("The views with which people's queue pages begin.")),
        ),
    ),
    Area(
        "profiles",
        _("Profiles and policies"),
        _("Defaults for runs, and what happens to idle GPUs."),
        "profiles",
        (
            Entry("profiles.profile", _("Defaults for runs: backends, durations, retries, utilization policy.")),
            Entry(
                "gpus.projectpolicies",
                _("How each project enforces utilization policies."),
                _("Policy enforcement"),
            ),
        ),
    ),
    Area(
        "capacity",
        _("Capacity"),
        _("Hosts, clouds and clusters that run jobs."),
        "hosts",
        (
            Entry("backends.backend", _("Own hosts, clouds and clusters, with a connection test.")),
            Entry("backends.host", _("Own machines: labels, set-up, draining.")),
            Entry("backends.gpu", _("GPUs that hosts reported.")),
            Entry("backends.instance", _("Machines started in a cloud, and why they ended."), _("Cloud instances")),
            Entry("backends.hostevent", _("When hosts joined, drained, failed or left.")),
        ),
    ),
    Area(
        "system",
        _("System"),
        _("What the scheduler keeps, for looking into a problem. Read-only."),
        "health",
        (
            Entry("audit.auditentry", _("Who changed what, when and from where."), _("Audit log")),
            Entry("runs.job", _("Nodes of runs, with their place and end.")),
            Entry("runs.allocation", _("CPUs, memory and GPUs that jobs hold.")),
            Entry("runs.runevent", _("What happened to runs.")),
            Entry("runs.queueevent", _("Changes of queues' settings.")),
            Entry("runs.verdict", _("Why runs wait: the last answer per queue and shape.")),
            Entry("runs.pastverdict", _("Earlier reasons to wait.")),
            Entry("runs.pastplace", _("Where runs stood in their queue.")),
            Entry("runs.membershare", _("Used, held and queued GPUs of members, for fair share.")),
            Entry("runs.queuecount", _("Counters of runs by status.")),
            Entry("runs.sweepcount", _("Counters of a sweep's runs by status.")),
            Entry("runs.archive", _("Uploaded code.")),
            Entry("runs.artifact", _("Files that runs left, with their sizes.")),
            Entry("progress.scope", _("Task counters of runs.")),
            Entry("progress.reporter", _("Programs that report tasks.")),
            Entry("scheduler.periodicjob", _("When each periodic job is due and last ran.")),
            Entry("scheduler.passstate", _("The last placement pass.")),
            Entry("scheduler.retention", _("How far old data is pruned.")),
            Entry("lib.watch", _("How long the server has watched hosts and runners.")),
            Entry("lib.lease", _("Which process does what only one may do.")),
            Entry("django_q.ormq", _("Tasks that wait for a worker."), _("Task queue")),
            Entry("django_q.failure", _("Tasks that ended with an error."), _("Failed tasks")),
        ),
        fixed=True,
    ),
)
UNUSED = frozenset(
    {
        "django_q.schedule",  # periodic jobs are rows of the scheduler's own
        "django_q.success",
    }
)
"""Models of other packages that this product keeps empty."""

AREA_OF = {entry.model: area for area in AREAS for entry in area.entries}
