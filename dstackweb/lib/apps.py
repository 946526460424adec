from django.apps import AppConfig
from django.utils.translation import gettext


class LibConfig(AppConfig):
    name = "dstackweb.lib"

    def ready(self) -> None:
        from dstackweb.lib import language, model_names

        language.use(gettext)
        model_names.translate()
