import atexit

from django.apps import AppConfig


class OffersConfig(AppConfig):
    name = "dstackweb.offers"

    def ready(self) -> None:
        from django.core.signals import request_finished
        from django.db.models.signals import post_save, pre_delete

        from dstackweb.backends.models import Backend
        from dstackweb.offers import catalog, counts, store

        store.check_policy()
        post_save.connect(catalog.backend_changed, sender=Backend, dispatch_uid="offers.changed")
        pre_delete.connect(catalog.backend_deleted, sender=Backend, dispatch_uid="offers.deleted")
        request_finished.connect(counts.flush_if_due, dispatch_uid="offers.counts")
        atexit.register(counts.flush)
