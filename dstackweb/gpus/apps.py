from django.apps import AppConfig


class GpusConfig(AppConfig):
    name = "dstackweb.gpus"
    verbose_name = "GPU utilization"
