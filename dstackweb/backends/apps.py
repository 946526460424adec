from django.apps import AppConfig


class BackendsConfig(AppConfig):
    name = "dstackweb.backends"
