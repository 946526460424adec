"""What people do on the pages of runs, with the forms that these have served."""

from __future__ import annotations

from typing import Any

from django.test import Client

from dstackweb.runs.models import Run
from tests.forms import submit

SUBMIT = "/p/main/submit/"


def page_of(run: Run) -> str:
    return f"/p/main/runs/{run.uid}/"


def show_plan(client: Client, config: str, **request: Any) -> Any:
    return submit(client, SUBMIT, {"config": config}, button="Show plan", **request)


def submit_file(client: Client, config: str, **request: Any) -> Any:
    return submit(client, SUBMIT, {"config": config}, button="Submit", **request)


def submit_with_archive(client: Client, config: str, archive: Any, **request: Any) -> Any:
    return submit(client, SUBMIT, {"config": config, "archive": archive}, button="Submit", **request)


def stop(client: Client, run: Run, **request: Any) -> Any:
    return submit(client, page_of(run), to="/stop/", having="Stop", **request)


def set_priority(client: Client, run: Run, priority: str) -> Any:
    return submit(client, page_of(run), {"priority": priority}, to="/priority/")
