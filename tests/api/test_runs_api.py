from __future__ import annotations

import hashlib

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Queue, Run
from tests.api.conftest import Api
from tests.factories import make_host, make_run, place_all

HELLO = "type: task\nname: hello\ncommands: [echo hello]\n"
RUNS = "projects/main/runs"
CONFIG = {"type": "task", "commands": ["true"]}


def test_a_run_is_submitted_read_changed_listed_and_stopped(api: Api) -> None:
    """R26."""
    made = api("POST", RUNS, {"config": HELLO})
    assert made.status_code == 201, made.content
    run = made.json()
    assert (run["name"], run["status"], run["priority"], run["position"]) == ("hello", "submitted", 50, 1)
    assert run["reason"] == "starting"
    assert [event["kind"] for event in run["events"]] == ["submitted"]
    assert api("GET", f"{RUNS}/{run['id']}").json()["name"] == "hello"
    changed = api("PATCH", f"{RUNS}/hello", {"priority": 60}, If_Match=made["ETag"])
    assert (changed.status_code, changed.json()["priority"]) == (200, 60)
    assert api("PATCH", f"{RUNS}/hello", {"priority": 61}, If_Match=made["ETag"]).status_code == 412
    assert [row["name"] for row in api("GET", f"{RUNS}?status=submitted").json()["items"]] == ["hello"]
    stopped = api("POST", f"{RUNS}/hello/stop")
    assert (stopped.status_code, stopped.json()["status"]) == (200, "terminated")
    assert api("POST", f"{RUNS}/hello/stop").status_code == 409


def test_an_ended_run_is_deleted_permanently(api: Api) -> None:
    run = api("POST", RUNS, {"config": HELLO}).json()
    refused = api("DELETE", f"{RUNS}/hello")
    assert (refused.status_code, "Stop it first" in refused.json()["detail"]) == (409, True)
    api("POST", f"{RUNS}/hello/stop")
    assert api("DELETE", f"{RUNS}/{run['id']}").status_code == 204
    assert api("DELETE", f"{RUNS}/{run['id']}").status_code == 404
    assert api("GET", RUNS).json()["items"] == []


def test_an_etag_that_a_proxy_made_weak_still_names_the_run(api: Api) -> None:
    tag = api("POST", RUNS, {"config": HELLO})["ETag"]
    assert api("PATCH", f"{RUNS}/hello", {"priority": 60}, If_Match=f"W/{tag}").status_code == 200
    assert api("PATCH", f"{RUNS}/hello", {"priority": 61}, If_Match=f"W/{tag}").status_code == 412
    assert api("PATCH", f"{RUNS}/hello", {"priority": 61}, If_Match="*").status_code == 200


def test_a_config_may_come_as_an_object(api: Api) -> None:
    made = api("POST", RUNS, {"config": {"type": "task", "commands": ["true"]}})
    assert made.status_code == 201
    assert made.json()["name"]


def test_the_plan_shows_settings_with_their_origin_offers_and_position_and_stores_nothing(api: Api) -> None:
    make_host()
    api("POST", RUNS, {"config": HELLO})
    plan = api("POST", f"{RUNS}/plan", {"config": "type: task\ncommands: [a]\npriority: 60\n"})
    assert plan.status_code == 200, plan.content
    body = plan.json()
    assert body["position"] == 1
    assert body["provenance"]["priority"] == {"source": "run_file", "line": 3}
    assert body["provenance"]["backends"] == {"source": "profile", "profile": "default"}
    assert [(offer["instance_type"], offer["availability"]) for offer in body["offers"]] == [("box-1", "idle")]
    assert body["warnings"] == []
    assert Run.objects.count() == 1


@pytest.mark.parametrize(("value", "codes"), [("hunter2", ["weak_value"]), ("hunter2-hunter2", [])])
def test_the_plan_says_when_a_value_of_the_shell_cannot_be_hidden_in_logs(
    api: Api, value: str, codes: list[str]
) -> None:
    make_host()
    plan = api("POST", f"{RUNS}/plan", {"config": HELLO + "env: [KEY]\n", "env": {"KEY": value}}).json()
    assert [note["code"] for note in plan["notes"]] == codes
    assert plan["warnings"] == []


def test_the_plan_says_that_preemptible_has_no_effect_and_shows_max_attempts(api: Api) -> None:
    make_host()
    config = HELLO + "preemptible: true\nretry: {max_attempts: 3}\n"
    plan = api("POST", f"{RUNS}/plan", {"config": config}).json()
    assert (plan["notes"][0]["code"], plan["warnings"]) == ("not_preempted", [])
    assert "preemptible has no effect in this queue" in plan["notes"][0]["message"]
    assert plan["settings"]["retry"]["max_attempts"] == 3
    Queue.objects.update(preempt_points=10)
    assert api("POST", f"{RUNS}/plan", {"config": config}).json()["notes"] == []
    assert api("POST", f"{RUNS}/plan", {"config": HELLO}).json()["notes"] == []


def test_the_plan_of_a_run_with_a_schedule_has_its_time_and_no_position(api: Api) -> None:
    make_host()
    config = HELLO + "schedule: {cron: '0 2 * * *'}\n"
    plan = api("POST", f"{RUNS}/plan", {"config": config}).json()
    submitted = api("POST", RUNS, {"config": config}).json()
    assert (plan["position"], plan["next_at"]) == (None, submitted["next_at"])
    assert api("POST", f"{RUNS}/plan", {"config": HELLO.replace("hello", "other")}).json()["next_at"] is None


def test_the_plan_offers_only_hosts_that_the_run_names(api: Api) -> None:
    make_host("attic", labels={"region": "attic"})
    make_host("cellar", labels={"region": "cellar"})
    for keys in ({"regions": ["cellar"]}, {"instance_types": ["cellar"]}):
        plan = api("POST", f"{RUNS}/plan", {"config": {"type": "task", "commands": ["a"], **keys}}).json()
        assert [offer["instance_type"] for offer in plan["offers"]] == ["cellar"]


def test_the_plan_warns_of_resources_that_no_host_has_and_submit_accepts_them(api: Api) -> None:
    make_host()
    config = "type: task\nname: huge\ncommands: [a]\nresources: {gpu: 'H100:16'}\n"
    plan = api("POST", f"{RUNS}/plan", {"config": config}).json()
    assert plan["warnings"][0]["code"] == "impossible"
    assert api("POST", RUNS, {"config": config}).status_code == 201
    place_all()
    run = api("GET", f"{RUNS}/huge").json()
    assert (run["status"], run["reason"]) == ("submitted", "impossible")
    assert run["reason_detail"]


@pytest.mark.parametrize(
    ("config", "line", "key"),
    [
        ("type: task\ncommands: [a\n", 2, None),
        ("type: task\ncommands: [a]\npriorty: 3\n", 3, "priorty"),
        ("type: task\ncommands: [a]\npriority: 101\n", 3, "priority"),
        ("type: task\ncommands: [a]\nnodes: two\n", 3, "nodes"),
        ("type: task\ncommands: [a]\nprofile: nope\n", 3, "profile"),
        ("type: task\ncommands: [a]\nqueue: nope\n", 3, "queue"),
    ],
)
def test_an_invalid_run_file_is_answered_with_line_key_and_expected_value(
    api: Api, config: str, line: int, key: str | None
) -> None:
    refused = api("POST", RUNS, {"config": config})
    assert refused.status_code == 422
    error = refused.json()["errors"][0]
    assert error["line"] == line
    assert key is None or error["loc"][0] == key
    assert error["msg"]
    assert refused.json()["detail"]


def test_a_run_file_over_256_kb_is_too_large(api: Api) -> None:
    assert api("POST", RUNS, {"config": HELLO + "#" * 256 * 1024}).status_code == 413


def test_malformed_bodies_are_refused_with_the_location(api: Api) -> None:
    assert api("POST", RUNS, {"config": HELLO, "prio": 1}).json()["errors"][0]["loc"][-1] == "prio"
    assert api("PATCH", f"{RUNS}/x", {"priority": "high"}).status_code == 422
    broken = api.client.post(f"/api/v1/{RUNS}", b"{", content_type="application/json", headers=api.headers)
    assert (broken.status_code, broken.json()["detail"]) == (422, "the body is not valid JSON")


def test_a_name_taken_by_an_active_run_is_a_conflict(api: Api) -> None:
    api("POST", RUNS, {"config": HELLO})
    refused = api("POST", RUNS, {"config": HELLO})
    assert refused.status_code == 409
    assert "Choose another name" in refused.json()["detail"]


def test_an_idempotency_key_makes_a_retry_safe(api: Api) -> None:
    first = api("POST", RUNS, {"config": HELLO}, Idempotency_Key="k")
    second = api("POST", RUNS, {"config": HELLO}, Idempotency_Key="k")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["id"] == second.json()["id"]


def test_no_token_is_401_and_a_stranger_sees_404_everywhere(api: Api, stranger: Api, project: Project) -> None:
    api("POST", RUNS, {"config": HELLO})
    paths = [
        ("GET", RUNS), ("POST", f"{RUNS}/plan"), ("POST", RUNS), ("GET", f"{RUNS}/hello"), ("PATCH", f"{RUNS}/hello"),
        ("POST", f"{RUNS}/hello/stop"), ("GET", f"{RUNS}/hello/logs"), ("GET", "projects/main/queues/default"),
        ("PUT", f"projects/main/archives/{'0' * 64}"),
    ]  # fmt: skip
    for method, path in paths:
        body = {"config": HELLO} if "plan" in path or (path == RUNS and method == "POST") else {"priority": 1}
        body = None if method in ("GET", "PUT") or path.endswith("stop") else body
        assert Api(None)(method, path, body).status_code == 401, path
        assert stranger(method, path, body).status_code == 404, path
    assert stranger("GET", "projects").json()["items"] == []
    assert Api(None)("GET", "projects", None).json()["detail"]


def test_the_queue_is_listed_in_its_order_page_by_page(api: Api, manager: Api) -> None:
    for index in range(5):
        api("POST", RUNS, {"config": {"type": "task", "name": f"run-{index}", "commands": ["a"]}})
    manager("PATCH", f"{RUNS}/run-3", {"priority": 90})
    first = api("GET", "projects/main/queues/default?limit=3").json()
    assert [item["name"] for item in first["items"]] == ["run-3", "run-0", "run-1"]
    rest = api("GET", f"projects/main/queues/default?limit=3&cursor={first['next']}").json()
    assert [(item["name"], item["position"]) for item in rest["items"]] == [("run-2", 4), ("run-4", 5)]
    assert rest["next"] is None


def test_only_managers_pause_a_queue(api: Api, manager: Api) -> None:
    assert api("PATCH", "projects/main/queues/default", {"paused": True}).status_code == 403
    assert manager("PATCH", "projects/main/queues/default", {"paused": True}).json()["paused"] is True


def test_the_list_continues_at_its_cursor(api: Api) -> None:
    for index in range(5):
        api("POST", RUNS, {"config": {"type": "task", "name": f"run-{index}", "commands": ["a"]}})
    seen, cursor = [], ""
    while True:
        page = api("GET", f"{RUNS}?limit=2{cursor}").json()
        seen += [row["name"] for row in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == ["run-4", "run-3", "run-2", "run-1", "run-0"]


def test_an_archive_is_kept_once_and_checked(api: Api) -> None:
    data = b"some bytes"
    digest = hashlib.sha256(data).hexdigest()
    url = f"/api/v1/projects/main/archives/{digest}"

    def put(path: str) -> int:
        return api.client.put(path, data, content_type="application/gzip", headers=api.headers).status_code

    assert api("HEAD", f"projects/main/archives/{digest}").status_code == 404
    assert [put(url), put(url)] == [201, 200]
    assert api("HEAD", f"projects/main/archives/{digest}").status_code == 200
    assert put(url.replace(digest, "0" * 64)) == 422
    assert api("POST", RUNS, {"config": HELLO, "archive": "1" * 64}).status_code == 422
    assert api("POST", RUNS, {"config": HELLO, "archive": digest}).status_code == 201


def test_hosts_and_limits_and_the_caller(api: Api) -> None:
    make_host(gpus=1)
    host = api("GET", "hosts").json()["items"][0]
    assert (host["name"], host["online"], host["gpus"][0]["uuid"]) == ("box-1", True, "GPU-box-1-0")
    assert api("GET", "user").json() == {"username": "ada", "is_admin": False}
    assert api("GET", "limits").json()["config_bytes"] == 256 * 1024
    assert api("GET", "projects").json()["items"] == [{"name": "main", "role": "member"}]


@pytest.mark.xdist_group("openapi")
def test_openapi_describes_every_public_path_and_no_runner_path(api: Api) -> None:
    paths = api("GET", "openapi.json").json()["paths"]
    assert "/api/v1/projects/{project}/runs/{name}/stop" in paths
    assert not [path for path in paths if "/runner/" in path]


def test_an_address_the_api_does_not_have_is_answered_in_its_own_form(api: Api) -> None:
    missing = api("GET", "projects/main/no/such/thing")
    assert missing.status_code == 404
    assert "openapi.json" in missing.json()["detail"]


def test_a_run_after_a_sweep_shows_it_as_one_that_runs(api: Api) -> None:
    sweep = api("POST", "projects/main/runs", {"config": {**CONFIG, "name": "trials", "array": 2}}).json()
    run = api("POST", "projects/main/runs", {"config": {**CONFIG, "name": "report", "after": "trials"}}).json()
    (after,) = run["after"]
    assert (after["run"], after["id"], after["sweep"], after["status"]) == ("trials", sweep["id"], True, "running")
    assert run["status_message"] == "Enters its queue after: trials is done."


def test_a_run_after_another_shows_what_it_waits_for_and_is_released(api: Api, member: User, project: Project) -> None:
    first = make_run(project, member, "prepare")
    planned = api("POST", "projects/main/runs/plan", {"config": {**CONFIG, "after": "prepare"}}).json()
    assert (planned["position"], planned["after_detail"]) == (None, "Enters its queue after: prepare is done.")
    assert planned["settings"]["after"] == ["prepare"]
    run = api("POST", "projects/main/runs", {"config": {**CONFIG, "name": "train", "after": "prepare"}}).json()
    assert (run["status"], run["position"], run["status_message"]) == ("pending", None, planned["after_detail"])
    expected = {"run": "prepare", "id": str(first.uid), "status": "submitted", "on": "done", "otherwise": "cancel"}
    assert run["after"] == [{**expected, "sweep": False, "outcome": "waiting"}]
    run = api("POST", "projects/main/runs/train/release").json()
    assert (run["status"], run["after"][0]["outcome"], run["position"]) == ("submitted", "released", 2)
    assert api("POST", "projects/main/runs/train/release").status_code == 409
    assert api("POST", "projects/main/runs/prepare/release").status_code == 409
