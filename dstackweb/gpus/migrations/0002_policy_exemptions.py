from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("gpus", "0001_what_was_seen_of_gpus")]

    operations = [
        migrations.RenameModel("Keep", "PolicyExemption"),
        migrations.RenameField("ProjectPolicies", "keeps", "max_exemptions"),
        migrations.RenameField("ProjectPolicies", "keep_minutes", "exemption_minutes"),
    ]
