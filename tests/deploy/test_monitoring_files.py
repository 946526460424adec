"""The alert rules and the dashboard ask for metrics that /metrics has, by labels that they have."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from dstackweb.api import monitoring
from tests.support import REPO

RULES = REPO / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = REPO / "deploy" / "grafana" / "dstackweb.json"
SCRAPED = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


def expressions() -> list[str]:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return rules + [target["expr"] for panel in panels for target in panel.get("targets", [])]


def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The labels of each series that /metrics can have."""
    labels: dict[str, set[str]] = {}

    def remember(name: str, _text: str, names: list[str], _rows: object, ending: str = "") -> Metric:
        labels[f"dstackweb_{name}{ending}"] = set(names)
        return Metric("x", "", "gauge")

    monkeypatch.setattr(monitoring, "_gauge", remember)
    monkeypatch.setattr(monitoring, "_counter", lambda *args: remember(*args, ending="_total"))
    registry = CollectorRegistry()
    registry.register(monitoring.StoredMetrics(monitoring.timezone.now()))
    list(registry.collect())
    http = {"route", "method", "status"}
    return labels | {f"dstackweb_http_request_seconds_{part}": http for part in ("bucket", "count", "sum")}


@pytest.mark.django_db
def test_every_expression_names_metrics_and_labels_that_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = exported(monkeypatch)
    found = expressions()
    assert len(found) > 40
    for expression in found:
        names = re.findall(r"\bdstackweb_\w+", expression)
        assert names or "up{" in expression
        assert set(names) <= set(labels), expression
        allowed = SCRAPED.union(*(labels[name] for name in names))
        matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
        grouped = re.findall(r"(?:by|on)\s*\(([^)]*)\)", expression)
        assert {*matched, *(word.strip() for group in grouped for word in group.split(","))} <= allowed, expression


@pytest.mark.django_db
def test_the_histogram_of_requests_is_exported_as_the_files_name_it() -> None:
    from dstackweb.lib import latency

    latency.observe("x", "GET", 200, 0.1)
    [metric] = latency.Latency().collect()
    assert {sample.name for sample in metric.samples} >= {
        f"dstackweb_http_request_seconds_{part}" for part in ("bucket", "count", "sum")
    }
    assert {label for sample in metric.samples for label in sample.labels} == {"route", "method", "status", "le"}


@pytest.mark.nightly
@pytest.mark.needs("prometheus")
def test_prometheus_loads_the_rules_and_they_fire_as_expected(tmp_path: Path) -> None:
    for what in (["check", "rules", str(RULES)], ["test", "rules", str(RULES.with_name("alerts_test.yml"))]):
        done = subprocess.run(["promtool", *what], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
