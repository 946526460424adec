"""The pictures that the documentation shows: which pages, how large, in which themes and languages."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
from django.utils import timezone
from playwright.sync_api import Page

from dstackweb.accounts.models import User
from dstackweb.backends.models import Host
from dstackweb.runs.history import hour_of
from dstackweb.runs.models import QueueHour
from dstackweb.scheduler.models import PassState, PeriodicJob
from dstackweb.scheduler.passes import forecast_pass
from dstackweb.scheduler.processes import tasks
from dstackweb.web import health
from tests.browser import cloud_demo, demo, gpu_demo, policy_demo
from tests.browser.support import settle

FOLDER = Path(__file__).parents[2] / "docs" / "images"
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
LANGUAGES = {"en": "en-GB", "zh": "zh-CN"}
"""What a browser is set to."""
LIMIT, LIMIT_ALL = 150_000, 2_500_000
"""Bytes of a picture, and of all of them."""
TAKEN_AT = datetime(2026, 11, 24, 14, 32, tzinfo=UTC)
"""What the clocks of server and browser show at first, so that a later set of pictures has the same times."""
SLOWER = 50
DESKTOP, PHONE = (1280, 760), (390, 780)
QUALITY = 82
LIKE_BEFORE = 0.0005
"""A picture of which a smaller part than this has changed visibly stays as it was."""
RUN_FILE = """\
type: task
name: finetune-7b
commands:
  - pip install -r requirements.txt
  - python finetune.py --epochs 3
env:
  LR: "1e-4"
resources:
  gpu: A100:80GB:2
  memory: 64GB..
max_duration: 8h
"""


class Picture(NamedTuple):
    """A page as a picture: `path` below the project's address, or from the root with a slash in front."""

    path: str
    size: tuple[int, int] = DESKTOP
    prepare: Callable[[Page], Any] | None = None
    languages: tuple[str, ...] = ("en",)
    themes: tuple[Theme, ...] = THEMES
    user: str = "mia"


def _plan(page: Page) -> None:
    page.get_by_label("Run file", exact=True).fill(RUN_FILE)
    page.locator("#result").get_by_text("gpu-box-1").first.wait_for()
    page.evaluate("document.activeElement.blur()")


def _preview(page: Page) -> None:
    """What the default profile would do with hosts that nobody has."""
    page.get_by_label("Maximum duration").fill("12h")
    page.get_by_label("Labels of hosts").fill("disk=nvme")
    page.get_by_role("button", name="Preview the impact").click()
    page.locator("#preview-result").get_by_text("could never start").first.wait_for()
    page.evaluate("document.activeElement.blur()")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")


def _scroll_to(selector: str, above: int = 12) -> Callable[[Page], Any]:
    script = f"one => scrollTo(0, one.getBoundingClientRect().top - {above})"
    return lambda page: page.locator(selector).evaluate(script)


SETS: dict[str, dict[str, Picture]] = {
    "team": {
        "queue": Picture("queue/", languages=(*LANGUAGES,)),
        "queue-phone": Picture("queue/", PHONE, _scroll_to("#waiting", 76)),
        "submit": Picture("submit/", prepare=_plan),
        "run": Picture("runs/train-llama-sft/", (1280, 900), languages=(*LANGUAGES,)),
        "log": Picture("runs/train-llama-sft/", (1280, 560), _scroll_to(".card:has(#log-tools)")),
        "why": Picture("runs/ab-reranker-7/why/", (1280, 640)),
        "sweep": Picture("sweeps/lr-grid/"),
        "progress": Picture("runs/train-llama-sft/progress/"),
        "wall": Picture("runs/train-llama-sft/progress/wall/", themes=("dark",)),
        "history": Picture("queues/default/history/?days=7"),
        "usage": Picture("usage/"),
        "health": Picture("health/"),
        "queue-settings": Picture("queues/night/settings/"),
        "members": Picture("members/", (1280, 480)),
        "notifications": Picture("/account/notifications/settings/"),
        "admin": Picture("/admin/", user="root"),
        "profile": Picture("/admin/profiles/profile/1/change/", (1280, 900), _preview, user="root"),
    },
    "gpus": {"gpus": Picture("gpus/"), "host": Picture("hosts/box-1/")},
    "policy": {"policy": Picture("utilization/?min_gpu_utilization=10&time_window=30m&scope=any&warmup=0s")},
    "cloud": {"offers": Picture("offers/?gpu=24GB..")},
}
"""What is photographed in which deployment."""


def fill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deployment of this name, whose processes run and whose hosts have a sandbox for each job."""
    if name == "gpus":
        gpu_demo.build()
    elif name == "policy":
        policy_demo.build()
    else:
        project, mia = demo.build()
        demo.sweep(project, mia)
        if name == "cloud":
            cloud_demo.build(project, monkeypatch)
        forecast_pass.refresh()
        QueueHour.objects.filter(hour=hour_of(timezone.now())).delete()  # in which the demo's runs waited for nothing
    now = timezone.now()
    cgroups = {"version": 2, "memory": True, "cpu": True}
    Host.objects.exclude(isolation="none").update(isolation="sandbox", cgroups=cgroups, seen_at=now)
    User.objects.filter(username="ann").update(last_login=now - timedelta(hours=2))
    User.objects.filter(username="bo").update(last_login=now - timedelta(days=1))
    tasks.ensure_rows(tasks.control_jobs())
    PeriodicJob.objects.update(due_at=now + timedelta(minutes=2), last_started_at=now, last_ended_at=now)
    workers = SimpleNamespace(status="Idle", workers=[1, 2], tob=now - timedelta(days=3))
    monkeypatch.setattr(health.Stat, "get_all", lambda: [workers])
    disk = SimpleNamespace(total=4 << 40, used=1 << 40, free=3 << 40)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda _path: disk)
    PassState.objects.update(duration_ms=31)


def file_name(name: str, language: str, theme: str) -> str:
    """Of the picture's file."""
    return f"{name}{'' if language == 'en' else f'-{language}'}-{theme}.webp"


def file_names() -> Iterator[str]:
    """Of all pictures."""
    for pictures in SETS.values():
        for name, picture in pictures.items():
            yield from (file_name(name, language, theme) for language in picture.languages for theme in picture.themes)


class _Moments(type):
    """Moments of the real class are moments of the class with another clock."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, datetime)


def set_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server's clock begin at `TAKEN_AT` and go slowly, so that samples stay fresh on a busy machine."""
    real_ns, began_ns = time.time_ns, time.time_ns()

    def now_ns() -> int:
        return int(TAKEN_AT.timestamp()) * 10**9 + (real_ns() - began_ns) // SLOWER

    class Moment(datetime, metaclass=_Moments):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.fromtimestamp(now_ns() / 1e9, tz)

    monkeypatch.setattr(timezone, "datetime", Moment)
    monkeypatch.setattr(time, "time", lambda: now_ns() / 1e9)
    monkeypatch.setattr(time, "time_ns", now_ns)


def take(page: Page, address: str, picture: Picture, theme: Theme) -> bytes:
    """The page as a WebP picture."""
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": picture.size[0], "height": picture.size[1]})
    page.clock.set_fixed_time(timezone.now())
    page.goto(address)
    page.wait_for_load_state("networkidle")
    if picture.prepare:
        picture.prepare(page)
    settle(page)
    debugger = page.context.new_cdp_session(page)
    taken = debugger.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    debugger.detach()
    return base64.b64decode(taken["data"])


CHANGED = """
async ([before, after]) => {
  const pixels = async (data) => {
    const image = await createImageBitmap(await (await fetch(`data:image/webp;base64,${data}`)).blob());
    const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    return canvas.getImageData(0, 0, image.width, image.height);
  };
  const [old, now] = [await pixels(before), await pixels(after)];
  if (old.width !== now.width || old.height !== now.height) return 1;
  let changed = 0;
  for (let at = 0; at < now.data.length; at += 4)
    changed += [0, 1, 2].some((part) => Math.abs(now.data[at + part] - old.data[at + part]) > 40);
  return (4 * changed) / now.data.length;
}
"""


def keep(blank: Page, file: Path, data: bytes) -> None:
    """Write the picture, unless the one that is there looks the same."""
    if file.exists():
        both = [base64.b64encode(one).decode() for one in (file.read_bytes(), data)]
        if blank.evaluate(CHANGED, both) < LIKE_BEFORE:
            return
    file.write_bytes(data)
