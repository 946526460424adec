from typing import Any

from django.apps import AppConfig
from django.core import checks


class BackendsConfig(AppConfig):
    name = "dstackweb.backends"

    def ready(self) -> None:
        checks.register(check_kinds, "backends")


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
