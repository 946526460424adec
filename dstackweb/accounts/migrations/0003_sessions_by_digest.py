from typing import Any

from django.db import migrations


def end_all(apps: Any, schema_editor: Any) -> None:
    """Rows had the keys as cookies have them, and so have backups of that time: those must not sign in any more."""
    apps.get_model("accounts", "Session").objects.all().delete()


class Migration(migrations.Migration):
    dependencies = [("accounts", "0002_password_failures")]
    operations = [migrations.RunPython(end_all, migrations.RunPython.noop, elidable=True)]
