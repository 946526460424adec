from django.apps import AppConfig


class ProgressConfig(AppConfig):
    name = "dstackweb.progress"
