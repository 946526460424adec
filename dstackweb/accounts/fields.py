"""How forms take a secret's value in."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from dstackweb.accounts.services.project_secrets import check_value
from dstackweb.lib.errors import Invalid


class WriteOnly(forms.Textarea):
    """Takes a value of several lines, such as a private key, and never sends one back to the page."""

    def format_value(self, value: Any) -> None:
        return None


class SecretField(forms.CharField):
    """A secret's value, spaces and lines as they were pasted: browsers send the ends of lines as CR LF."""

    widget = WriteOnly

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(strip=False, **kwargs)
        self.widget.attrs |= {"rows": 3, "autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}

    def clean(self, value: Any) -> str:
        text = str(super().clean(value)).replace("\r\n", "\n")
        try:
            check_value(text)
        except Invalid as error:
            raise ValidationError(error.errors[0]["msg"]) from None
        return text
