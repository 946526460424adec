from django.apps import AppConfig
from django.utils.translation import gettext


class LibConfig(AppConfig):
    name = "dstackweb.lib"

    def ready(self) -> None:
        from dstackweb.lib import language

        language.use(gettext)
