"""The reader's SSH keys."""

from __future__ import annotations

from pathlib import Path

from django import forms
from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from dstackweb.accounts import ssh_keys
from dstackweb.accounts.models import SSHKey
from dstackweb.lib.ssh_keys import host_fingerprint
from dstackweb.web.accounts.forms import Styled, attempt
from dstackweb.web.common.pages import PageRequest, account_page, done


class KeyForm(Styled):
    public_key = forms.CharField(
        label=gettext_lazy("Public key"),
        max_length=10_000,
        help_text=gettext_lazy("The line of ~/.ssh/id_ed25519.pub. Make one with: ssh-keygen -t ed25519"),
        widget=forms.Textarea(
            attrs={
                "rows": 3, "placeholder": "ssh-ed25519 AAAA… ada@laptop", "class": "mono", "spellcheck": "false",
                "autocapitalize": "none", "autocomplete": "off",
            }
        ),
    )  # fmt: skip
    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=80,
        required=False,
        help_text=gettext_lazy("Taken from the key's comment if empty."),
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )


@account_page
def keys(request: PageRequest) -> HttpResponse:
    """The reader's keys, and a form for one more."""
    form = KeyForm(request.POST if request.method == "POST" else None)
    if request.method == "POST":
        row = attempt(form, lambda: ssh_keys.add(request.user, **form.cleaned_data))
        if isinstance(row, SSHKey):
            return done(request, _("SSH key %(name)s added.") % {"name": row.name}, reverse("ssh-keys"))
    values = {
        "form": form,
        "keys": request.user.ssh_keys.all(),
        "fingerprint": host_fingerprint(Path(settings.DSTACKWEB_HOME)) if settings.DSTACKWEB_SSH_PORT else "",
    }
    return render(request, "accounts/ssh_keys.html", values, status=422 if form.errors else 200)


@account_page
@require_POST
def remove(request: PageRequest, key_id: int) -> HttpResponse:
    row = ssh_keys.remove(request.user, key_id)
    return done(request, _("SSH key %(name)s removed.") % {"name": row.name}, reverse("ssh-keys"))
