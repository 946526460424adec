"""What people send: settings that several may have open at the same time, and numbers in addresses."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _

NUMBER_MAX = 2**53


class MergedForm(forms.BaseForm):
    """Changes only what its user has changed, where others have saved the same settings since it was opened.

    Each field also sends the value that was shown. One that was left as it was keeps the present value, and one that
    two people have changed is refused. The form's initial values are the present ones. The form of something new has
    none, however it was filled in before it was shown: it is saved as it was sent.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        instance = getattr(self, "instance", None)
        self.merges = instance is None or not instance._state.adding
        for field in self.fields.values():
            # What was typed into a field for secrets must not come back on a page.
            field.show_hidden_initial = self.merges and not isinstance(field.widget, forms.PasswordInput)

    @property
    def changes(self) -> dict[str, Any]:
        """What to save of a valid form: what was changed, and what came without the value that was shown."""
        names = (one for one in self.fields if one in self.changed_data or self[one].html_initial_name not in self.data)
        return {name: self.cleaned_data[name] for name in names}

    def clean(self) -> Any:
        cleaned = super().clean() or self.cleaned_data
        for name, field in self.fields.items():
            sent = self[name].html_initial_name
            if not self.merges or name not in cleaned or sent not in self.data:
                continue
            now = self.get_initial_for_field(field, name)
            if not _differs(field, now, field.hidden_widget().value_from_datadict(self.data, self.files, sent)):
                continue
            if name not in self.changed_data:
                cleaned[name] = field.clean(field.prepare_value(now))
            elif _differs(field, now, self[name].data):
                self.add_error(
                    name, _("This was changed since you opened the page. Nothing was saved: reload the page.")
                )
        return cleaned


def _differs(field: forms.Field, now: Any, sent: Any) -> bool:
    """Whether a value is not the present one. Browsers send lines with ends of their own."""
    if isinstance(now, str) and isinstance(sent, str):
        return now.strip().splitlines() != sent.strip().splitlines()
    return field.has_changed(now, sent)


def whole_number(text: str | None, least: int = 0) -> int:
    """An integer of a query string, capped at what databases can store; `least` for anything else."""
    try:
        return min(max(least, int(text or "")), NUMBER_MAX)
    except ValueError:
        return least
