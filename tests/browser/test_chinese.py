"""A member's day in Chinese: the language is chosen before signing in, and English is one press away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import User
from tests.browser import demo
from tests.browser.conftest import Complaints


@pytest.mark.django_db(transaction=True)
def test_a_member_signs_in_looks_for_a_run_and_stops_it_in_chinese(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    demo.build()
    mia = User.objects.get(username="mia")
    mia.set_password("correct horse battery")
    mia.save()
    page = new_page(reduced_motion="reduce")
    page.goto(f"{live_server.url}/login/?next=/p/main/queue/")
    page.get_by_role("button", name="简体中文").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-hans")
    page.get_by_label("用户名").fill("mia")
    page.get_by_label("密码", exact=True).fill("correct horse battery")
    page.get_by_role("button", name="登录", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("队列")
    row = page.locator("tr", has_text="ab-reranker-7").first
    expect(row).to_contain_text("需要 2 块 GPU")
    expect(row).to_contain_text("小时")
    page.locator("a", has_text="ab-reranker-7").first.click()
    page.get_by_role("button", name="停止").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("ab-reranker-7")
    dialog.get_by_role("button").last.click()
    expect(page.locator("main")).to_contain_text("已停止")
    where = page.url
    page.locator("summary", has_text="mia").click()
    page.get_by_role("button", name="English").click()
    expect(page.locator("html")).to_have_attribute("lang", "en")
    assert page.url == where
    mia.refresh_from_db()
    assert mia.language == "en"
