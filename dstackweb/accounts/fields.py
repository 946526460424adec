"""The form field for a secret's value."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from dstackweb.accounts.services import check_value
from dstackweb.lib.errors import Invalid


class WriteOnly(forms.Textarea):
    """A field for values with several lines, such as private keys, that never shows the stored value."""

    def format_value(self, value: Any) -> None:
        return None


class SecretField(forms.CharField):
    """A secret's value with its spaces and line breaks; the CR LF that browsers send becomes LF."""

    widget = WriteOnly

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(strip=False, **kwargs)
        self.widget.attrs |= {"rows": 3, "autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}
        self.widget.attrs["data-no-draft"] = True  # which static/js/drafts.js leaves out

    def clean(self, value: Any) -> str:
        text = str(super().clean(value)).replace("\r\n", "\n")
        try:
            check_value(text)
        except Invalid as error:
            raise ValidationError(error.errors[0]["msg"]) from None
        return text
