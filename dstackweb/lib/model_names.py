"""Names of models and their fields, and what helps with them, in the reader's language on the admin site.

Django makes these names of the Python ones, so there is no text to mark. Migrations keep the English ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.db.models import Model
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy

OURS = "dstackweb."
texts: set[str] = set()
"""What was found, in English, for the catalogue."""


def translate() -> None:
    """Let all of these texts be translated when they are shown."""
    for owner, name in _places():
        text = getattr(owner, name)
        if name == "verbose_name_plural" and not isinstance(owner.verbose_name, Promise):
            text = str(text)  # Django adds an s when it is shown
        if text and not isinstance(text, Promise):
            texts.add(text)
            setattr(owner, name, gettext_lazy(text))


def of_others() -> set[str]:
    """Those of other packages on the site, as they are without a language. Django's own it has in all our languages."""
    models = [model for model in admin.site._registry if not model.__module__.startswith((OURS, "django."))]
    models += [model._meta.concrete_model for model in models if model._meta.concrete_model]  # whose fields a proxy has
    return {str(getattr(owner, name)) for owner, name in _names(models)} - {""}


def _places() -> Iterator[tuple[Any, str]]:
    """The attributes that have ours."""
    for config in apps.get_app_configs():
        if config.name.startswith(OURS):
            yield config, "verbose_name"
    inlines = (inline.model for shown in admin.site._registry.values() for inline in shown.inlines)
    models = dict.fromkeys((*admin.site._registry, *inlines))
    yield from _names(model for model in models if model.__module__.startswith(OURS))


def _names(models: Iterable[type[Model]]) -> Iterator[tuple[Any, str]]:
    """The attributes that models and their fields have; a model's plural before its singular."""
    for model in models:
        yield model._meta, "verbose_name_plural"
        yield model._meta, "verbose_name"
        for field in (*model._meta.local_fields, *model._meta.local_many_to_many):
            yield field, "verbose_name"
            yield field, "help_text"
