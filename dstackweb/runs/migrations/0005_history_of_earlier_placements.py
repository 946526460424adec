import bisect
import datetime as dt
from collections import defaultdict

from django.db import migrations
from django.utils import timezone

BOUNDS_S = (60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400)
BUCKETS = ('waited_1m', 'waited_5m', 'waited_15m', 'waited_1h', 'waited_4h', 'waited_12h', 'waited_1d', 'waited_longer')
KEPT_DAYS = 90


def count_earlier_placements(apps, schema_editor):
    """Placements from before hours were counted, by their events: each from when its run had last entered the queue.

    A run's band is that of the priority it has now, and its queue the one that it is in now.
    """
    hour_now = timezone.now().replace(minute=0, second=0, microsecond=0)
    events = apps.get_model('runs', 'RunEvent').objects.filter(
        kind__in=('submitted', 'requeued', 'provisioning'), at__gte=hour_now - dt.timedelta(days=KEPT_DAYS)
    )
    rows = events.order_by('id').values_list(
        'run_id', 'kind', 'at', 'data__from', 'run__queue_id', 'run__priority', 'run__submitted_at'
    )
    entered, waits = {}, defaultdict(list)
    for run, kind, at, old, queue, priority, submitted_at in rows.iterator(chunk_size=2000):
        if kind != 'provisioning':
            entered[run] = at
        elif old == 'submitted':
            hour = at.replace(minute=0, second=0, microsecond=0)
            waited = int((at - entered.get(run, submitted_at)).total_seconds())
            waits[queue, min(priority // 25, 3), hour].append(max(0, waited))
    QueueHour = apps.get_model('runs', 'QueueHour')
    QueueHour.objects.bulk_create(
        (_row(QueueHour, key, seconds) for key, seconds in sorted(waits.items())), batch_size=500
    )


def _row(QueueHour, key, seconds):
    queue, band, hour = key
    row = QueueHour(
        queue_id=queue, band=band, hour=hour, placed=len(seconds), wait_s=sum(seconds), wait_max_s=max(seconds)
    )
    for waited in seconds:
        bucket = BUCKETS[bisect.bisect_left(BOUNDS_S, waited)]
        setattr(row, bucket, getattr(row, bucket) + 1)
    return row


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0004_waits_in_columns'),
    ]

    operations = [
        migrations.RunPython(count_earlier_placements, migrations.RunPython.noop, elidable=True),
    ]
