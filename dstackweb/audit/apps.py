from django.apps import AppConfig


class AuditConfig(AppConfig):
    name = "dstackweb.audit"

    def ready(self) -> None:
        from dstackweb.audit import recorder

        recorder.connect()
