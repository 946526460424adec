from collections import Counter, defaultdict

from django.db import migrations
from django.db.models import Count
from django.utils import timezone

from dstackweb.progress.prefixes import split

STATES = {
    'pending': 'waiting', 'submitted': 'queued',
    'provisioning': 'processing', 'running': 'processing', 'terminating': 'processing',
    'done': 'memory', 'failed': 'erred', 'terminated': 'released',
}


def count_runs(apps, schema_editor):
    """Counters of the runs that there are: each is a task of its project, in the group of its name.

    How fast runs ended before is not known any more: rates begin with the next one.
    """
    Run, Scope = apps.get_model('runs', 'Run'), apps.get_model('progress', 'Scope')
    now_ms = int(timezone.now().timestamp() * 1000)
    for project in Run.objects.order_by('project').values_list('project', flat=True).distinct():
        scope, _made = Scope.objects.get_or_create(project_id=project, run_id=0, attempt=0)
        of_group = _counted(Run.objects.filter(project=project))
        of_prefix, whole = defaultdict(Counter), Counter()
        for (prefix, _name), counts in of_group.items():
            of_prefix[prefix].update(counts)
            of_prefix[prefix]['groups'] += 1
            whole.update(counts)
        scope.prefixes, scope.groups, scope.version = len(of_prefix), len(of_group), scope.version + 1
        for name, count in whole.items():
            setattr(scope, name, count)
        scope.changed_ms = scope.first_ms = now_ms
        scope.save()
        stamps = {'version': scope.version, 'changed_ms': now_ms}
        TaskPrefix, TaskGroup = apps.get_model('progress', 'TaskPrefix'), apps.get_model('progress', 'TaskGroup')
        TaskPrefix.objects.bulk_create(
            TaskPrefix(scope_id=scope.pk, name=name, first_ms=now_ms, **counts, **stamps)
            for name, counts in sorted(of_prefix.items())
        )
        ids = dict(TaskPrefix.objects.filter(scope_id=scope.pk).values_list('name', 'pk'))
        TaskGroup.objects.bulk_create(
            (
                TaskGroup(prefix_id=ids[prefix], name=name, **counts, **stamps)
                for (prefix, name), counts in sorted(of_group.items())
            ),
            batch_size=1000,
        )


def _counted(runs):
    """By prefix and name, how many runs are in each state, and how long those took that came to their own end."""
    found = defaultdict(Counter)
    for name, status, number in runs.order_by().values_list('name', 'status').annotate(n=Count('pk')).iterator():
        counts = found[split(name).prefix, name]
        counts[STATES[status]] += number
        counts['total'] += number
    timed = runs.filter(status__in=('done', 'failed'), started_at__isnull=False, ended_at__isnull=False)
    for name, started, ended in timed.values_list('name', 'started_at', 'ended_at').iterator():
        counts = found[split(name).prefix, name]
        counts['duration_n'] += 1
        counts['duration_s'] += max(0.0, (ended - started).total_seconds())
    return found


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0010_jobs_on_instances'),
        ('progress', '0001_what_tasks_do'),
    ]

    operations = [
        migrations.RunPython(count_runs, migrations.RunPython.noop, elidable=True),
    ]
