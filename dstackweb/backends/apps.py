from typing import Any

from django.apps import AppConfig
from django.core import checks


class BackendsConfig(AppConfig):
    name = "dstackweb.backends"

    def ready(self) -> None:
        import atexit

        from django.core.signals import request_finished

        from dstackweb.backends import api_calls

        checks.register(check_kinds, "backends")
        request_finished.connect(api_calls.flush_if_due, dispatch_uid="backends.api_calls")
        atexit.register(api_calls.flush)


def check_kinds(**_options: Any) -> list[checks.CheckMessage]:
    """The kind of own hosts is always found, unless the installed package's entry points are missing or outdated."""
    from dstackweb.backends import registry

    if registry.host_kinds():
        return []
    broken = "".join(f" {name}: {why}." for name, why in registry.BROKEN.items())
    return [
        checks.Error(
            f"The built-in backend kinds are not installed.{broken}",
            hint="The metadata of the dstackweb package is missing or outdated. Reinstall it into this environment, "
            "in a checkout with `pip install -e .`, then start again.",
            id="backends.E001",
        )
    ]
