"""The pages."""

from django.apps import AppConfig


class WebConfig(AppConfig):
    name = "dstackweb.web"
    label = "web"
