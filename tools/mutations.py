"""Breaks the product on purpose, in a copy, and checks that the tests fail.

    python -m tools.mutations                 all of them, with the SQLite side
    python -m tools.mutations --check         only check that each still applies
    python -m tools.mutations --jobs 2 claim  those with the word in their name or room

Each mutation is a small mistake that someone could make. The tests named beside it must fail with it. Files
are found by their room and the text, tests by their room and file name, so that both may move within their rooms.
Exits with 1 when a mutation survives or no longer applies.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600


@dataclass(frozen=True)
class Mutation:
    """`new` replaces `old`, which occurs once below `dstackweb/ROOM`; then `tests` must fail."""

    room: str
    name: str
    old: str
    new: str
    tests: str
    """Files, such as `runs/test_moves.py`: a room of tests, and the name of a file anywhere in it."""


class DoesNotApply(Exception):
    """The text or the tests of a mutation were not found."""


def m(room: str, name: str, old: str, new: str, tests: str) -> Mutation:
    return Mutation(room, name, old, new, tests)


MUTATIONS = [
    # The order of a queue, and moves in it.
    m(
        "runs",
        "more priority goes back",
        "return seniority_us + penalty_s * SECOND_US - priority * step",
        "return seniority_us + penalty_s * SECOND_US + priority * step",
        "runs/test_ordering.py",
    ),
    m(
        "runs",
        "two runs of one moment",
        "return max(now_us, last_us + MIN_GAP_US)",
        "return max(now_us, last_us)",
        "runs/test_ordering.py runs/test_services.py",
    ),
    m(
        "runs",
        "strict is not strict",
        "return STRICT_STEP_US if ageing_minutes is None else ageing_minutes * 60 * 1_000_000",
        "return (ageing_minutes or 30) * 60 * 1_000_000",
        "runs/test_ordering.py runs/test_reorder.py",
    ),
    m(
        "runs",
        "a move of what stands there",
        "if all(one < other for one, other in itertools.pairwise(standing)):",
        "if False:",
        "runs/test_moves.py runs/test_reorder.py",
    ),
    m(
        "runs",
        "equal ranks, by id",
        "return -FAR if edge is None else edge.rank + (gap or int(run.id < edge.id))",
        "return -FAR if edge is None else edge.rank + gap",
        "runs/test_moves.py",
    ),
    m(
        "runs",
        "priority over the maximum",
        "high = min(high, most)\n        return min(max(wanted, low), high)",
        "return min(max(wanted, low), high)",
        "runs/test_moves.py runs/test_reorder.py",
    ),
    m(
        "runs",
        "undo after a change",
        "if any(place.priority > max(most, run.priority)",
        "if any(False",
        "runs/test_moves.py runs/test_reorder.py",
    ),
    # Transitions.
    m("runs", "any move is legal", "if new not in RUN_MOVES[old]:", "if False:", "runs/test_transitions.py"),
    m("runs", "any job move is legal", "if new not in JOB_MOVES[old]:", "if False:", "runs/test_transitions.py"),
    m(
        "runs",
        "status unguarded",
        "mine = Run.objects.filter(pk__in=keys, status=old, attempt=attempt, queue=queue_id)",
        "mine = Run.objects.filter(pk__in=keys, attempt=attempt, queue=queue_id)",
        "runs/test_transitions.py runs/test_races.py",
    ),
    m(
        "runs",
        "attempt unguarded",
        "mine = Run.objects.filter(pk__in=keys, status=old, attempt=attempt, queue=queue_id)",
        "mine = Run.objects.filter(pk__in=keys, status=old, queue=queue_id)",
        "runs/test_transitions.py",
    ),
    m(
        "runs",
        "queue unguarded",
        "mine = Run.objects.filter(pk__in=keys, status=old, attempt=attempt, queue=queue_id)",
        "mine = Run.objects.filter(pk__in=keys, status=old, attempt=attempt)",
        "runs/test_races.py",
    ),
    m(
        "runs",
        "lost race unnoticed",
        'if mine.update(status=new, version=F("version") + 1, **values) != len(keys):',
        'if mine.update(status=new, version=F("version") + 1, **values) < 0:',
        "runs/test_transitions.py runs/test_races.py",
    ),
    m(
        "runs",
        "counter of the old status stays",
        "changes.add(run, run.status, -1)\n            changes.add(run, new.value, 1)",
        "changes.add(run, new.value, 1)",
        "runs/test_transitions.py runs/test_recount.py",
    ),
    m(
        "runs",
        "claimed job is unclaimed",
        'guard = {"claim_nonce": ""} if unclaimed else {}',
        "guard = {}",
        "runs/test_transitions.py",
    ),
    m(
        "runs",
        "poll sees no change",
        'Run.objects.filter(pk=run_id).update(version=F("version") + 1)',
        'Run.objects.filter(pk=run_id).update(version=F("version"))',
        "runs/test_transitions.py",
    ),
    # What jobs hold.
    m(
        "runs",
        "CPUs given twice",
        'cpus__gte=F("cpus_used") + cpus,',
        "",
        "runs/test_allocations.py",
    ),
    m(
        "runs",
        "memory given twice",
        'memory_mib__gte=F("memory_used_mib") + memory_mib,',
        "",
        "runs/test_allocations.py",
    ),
    m(
        "runs",
        "placed on a draining host",
        "draining=False,\n        held_back_at=None,\n        cpus__gte",
        "held_back_at=None,\n        cpus__gte",
        "runs/test_allocations.py",
    ),
    m(
        "runs",
        "an absent GPU is given",
        "uuid__in=uuids, present=True)",
        "uuid__in=uuids)",
        "runs/test_allocations.py",
    ),
    m("runs", "memory never freed", '"memory_used_mib") - memory_mib', '"memory_used_mib")', "runs/test_attempts.py"),
    # Claims, ends, retries.
    m(
        "runs",
        "two runners, one job",
        'status=JobStatus.PROVISIONING, claim_nonce="").update(',
        "status=JobStatus.PROVISIONING).update(",
        "runs/test_attempts.py runs/test_races.py",
    ),
    m(
        "runs",
        "any nonce will do",
        "if job.claim_nonce != nonce or job.status not in JOB_ACTIVE:",
        "if job.status not in JOB_ACTIVE:",
        "runs/test_attempts.py runs/test_races.py api/test_runner_api.py",
    ),
    m(
        "runs",
        "a job ends twice",
        "if job.status not in JOB_ACTIVE:\n            return False",
        "if False:\n            return False",
        "runs/test_attempts.py",
    ),
    m(
        "runs",
        "why it was stopped is lost",
        "if job.stop_reason and reason != Reason.DONE_BY_RUNNER:",
        "if False:",
        "runs/test_attempts.py runs/test_services.py",
    ),
    m(
        "runs",
        "retry for ever",
        "if covered and in_number and (until is None or now < until):",
        "if covered and in_number:",
        "runs/test_outcome.py",
    ),
    m(
        "runs",
        "retry whatever happened",
        "covered = RETRY_EVENT.get(culprit.reason) in run.retry_on",
        "covered = True",
        "runs/test_outcome.py",
    ),
    m(
        "runs",
        "series never begins anew",
        "now - culprit.started_at >= run.retry_for:",
        "False:",
        "runs/test_outcome.py",
    ),
    m(
        "runs",
        "the last failure is named",
        "return min(bad, key=order, default=None)",
        "return max(bad, key=order, default=None)",
        "runs/test_outcome.py",
    ),
    m(
        "runs",
        "others run on",
        "if culprit is not None and run.status != RunStatus.TERMINATING:",
        "if False:",
        "runs/test_outcome.py",
    ),
    m(
        "runs",
        "failed nodes are done",
        "if all(job.status == JobStatus.DONE for job in jobs):",
        "if any(job.status == JobStatus.DONE for job in jobs):",
        "runs/test_outcome.py",
    ),
    # Edits and access.
    m(
        "runs",
        "ETag without priority",
        'text = f"{run.pk}:{run.priority}:',
        'text = f"{run.pk}:',
        "api/test_runs_api.py runs web/test_moves.py",
    ),
    m(
        "runs",
        "stale edits pass",
        'return if_match is None or if_match.removeprefix("W/")',
        'return True or if_match.removeprefix("W/")',
        "api/test_runs_api.py runs web/test_moves.py",
    ),
    m(
        "accounts",
        "members change others' runs",
        'return allows(role, "manager") or (allows(role, "member") and owner_id == user.pk)',
        'return allows(role, "member")',
        "runs/test_reorder.py runs/test_services.py",
    ),
    m(
        "accounts",
        "viewers change their runs",
        'return allows(role, "manager") or (allows(role, "member") and owner_id == user.pk)',
        'return allows(role, "manager") or owner_id == user.pk',
        "runs api/test_runs_api.py",
    ),
    m(
        "runs",
        "members above their maximum",
        'if priority > project.member_max_priority and not allows(role, "manager"):',
        "if False:",
        "runs/test_services.py runs/test_reorder.py",
    ),
    m(
        "accounts",
        "roles the wrong way round",
        "_LEVELS[role] >= _LEVELS[at_least]",
        "_LEVELS[role] <= _LEVELS[at_least]",
        "accounts/test_access.py",
    ),
    m(
        "accounts",
        "not a member, and yet",
        "if project is None or role is None:\n        raise NotFound",
        "if project is None:\n        raise NotFound",
        "accounts/test_access.py",
    ),
    m(
        "accounts",
        "who is not active",
        "[user.pk, name]) if user.is_active else ()",
        "[user.pk, name])",
        "accounts/test_access.py",
    ),
    m(
        "accounts",
        "a revoked token works",
        "WHERE token.digest = %s AND token.revoked_at IS NULL",
        "WHERE token.digest = %s",
        "accounts/test_tokens.py",
    ),
    m(
        "accounts",
        "a sign-in link works twice",
        "filter(pk=row.pk, used_at=None, expires_at__gt=now)",
        "filter(pk=row.pk)",
        "accounts/test_races.py",
    ),
    m(
        "accounts",
        "an old sign-in link works",
        "if row.expires_at <= timezone.now():",
        "if False:",
        "accounts/test_sign_in_pages.py accounts/test_tokens.py accounts",
    ),
    # The placement pass.
    m(
        "scheduler",
        "two passes at once",
        "if cls.objects.filter(free, pk=1).update(",
        "if cls.objects.filter(pk=1).update(",
        "scheduler/test_faults.py scheduler/test_placement_pass.py",
    ),
    m(
        "scheduler",
        "generation stands still",
        'update(generation=F("generation") + 1, ',
        'update(generation=F("generation"), ',
        "scheduler/test_faults.py scheduler/test_placement_pass.py",
    ),
    m(
        "scheduler",
        "a lost claim is renewed",
        "if not cls.objects.filter(pk=1, generation=generation).update(expires_at=until):",
        "if not cls.objects.filter(pk=1).update(expires_at=until):",
        "scheduler/test_faults.py scheduler/test_placement_pass.py",
    ),
    m(
        "scheduler",
        "a request is lost",
        "PassRequest.make(urgent=False)  # the running pass",
        "pass  # the running pass",
        "scheduler/test_faults.py scheduler/test_placement_pass.py",
    ),
    m(
        "scheduler",
        "what is freed waits with what is added",
        "if PassRequest.is_urgent():",
        "if False:",
        "scheduler/test_requests.py",
    ),
    m(
        "scheduler",
        "weights do not count",
        "return (held.gpus if asks_gpus else held.cpus) / weight, borrows",
        "return (held.gpus if asks_gpus else held.cpus), borrows",
        "scheduler/test_fairness.py",
    ),
    m(
        "scheduler",
        "GPUs do not count",
        "(held.gpus if asks_gpus else held.cpus) / weight",
        "held.cpus / weight",
        "scheduler/test_fairness.py",
    ),
    m(
        "scheduler",
        "one over the limit",
        "if limit is not None and asked and used + asked > limit",
        "if limit is not None and asked and used > limit",
        "scheduler/test_limits.py",
    ),
    m(
        "scheduler",
        "runs without GPUs wait for a GPU limit",
        "if limit is not None and asked and used + asked > limit",
        "if limit is not None and used + asked > limit",
        "scheduler/test_limits.py",
    ),
    m(
        "scheduler",
        "backfill past the start",
        "reserved.until is not None and end <= reserved.until",
        "reserved.until is not None",
        "scheduler/test_reservation.py",
    ),
    m(
        "scheduler",
        "stopping takes no time",
        "dt.timedelta(seconds=limit_s + stop_s + MARGIN_S)",
        "dt.timedelta(seconds=limit_s)",
        "scheduler/test_reservation.py",
    ),
    m(
        "scheduler",
        "a gang by half is enough",
        "lambda gone: len(found(gone)) == run.spec.nodes",
        "lambda gone: len(found(gone)) > 0",
        "scheduler/test_reservation.py",
    ),
    m(
        "scheduler",
        "paid without being named",
        "if offer.price > 0 and not named:",
        "if False:",
        "scheduler/test_offers.py",
    ),
    m(
        "scheduler",
        "over the maximum price",
        "if spec.max_price is not None and offer.price > Decimal",
        "if False and offer.price > Decimal",
        "scheduler/test_paid_placement.py",
    ),
    m(
        "scheduler",
        "without quota, and yet",
        "if offer.availability in NOT_NOW or (",
        "if (",
        "scheduler/test_paid_placement.py",
    ),
    m(
        "scheduler",
        "spot where none is wanted",
        'if spec.spot_policy == "on-demand" and offer.spot:',
        "if False:",
        "scheduler/test_paid_placement.py",
    ),
    # What several processes share.
    m(
        "lib",
        "a lease of two",
        "cls.objects.filter(free, pk=name).update(",
        "cls.objects.filter(pk=name).update(",
        "lib/test_leases.py",
    ),
    m(
        "lib",
        "a lost lease is renewed",
        "cls.objects.filter(pk=name, holder=holder).update(expires_at=until)",
        "cls.objects.filter(pk=name).update(expires_at=until)",
        "lib/test_leases.py",
    ),
    m(
        "lib",
        "anyone gives a lease back",
        "cls.objects.filter(pk=name, holder=holder).delete()",
        "cls.objects.filter(pk=name).delete()",
        "lib/test_leases.py",
    ),
    m(
        "lib",
        "an open circuit lets through",
        "if now < circuit.open_until <= now + dt.timedelta(seconds=CAP_S):\n            raise Open",
        "if False:\n            raise Open",
        "lib/test_circuit.py",
    ),
    m(
        "lib",
        "all probe at once",
        "cls.objects.filter(free, pk=name, open_until=circuit.open_until)",
        "cls.objects.filter(pk=name)",
        "lib/test_circuit.py",
    ),
    m(
        "lib",
        "success keeps it open",
        "update(failures=0, open_until=None, probe_until=None)",
        "update(failures=0)",
        "lib/test_circuit.py",
    ),
    m(
        "lib",
        "no debt",
        "left = room(tokens, at_us, rate, burst, now_us) - amount",
        "left = room(tokens, at_us, rate, burst, now_us)",
        "lib/test_limiter.py",
    ),
    m("lib", "the bucket has no end", "return min(burst, tokens + ", "return (tokens + ", "lib/test_limiter.py"),
    m("lib", "waits longer than it may", "if wait_s > most_s:", "if False:", "lib/test_limiter.py"),
    m(
        "offers",
        "work is done twice at once",
        "if Lease.take(name, holder, LEASE_S, timezone.now()):",
        "if True:",
        "offers/test_processes.py offers",
    ),
    m(
        "offers",
        "old answers are fresh",
        "return now >= until or row.fetched_at > now + SKEW or row.error is not None",
        "return row.fetched_at > now + SKEW or row.error is not None",
        "offers",
    ),
    m("offers", "an answer from the future", "row.fetched_at > now + SKEW or ", "", "offers"),
    m(
        "offers",
        "nothing is kept as long as something",
        "min(ttl_s, EMPTY_TTL_S if row.empty else ttl_s)",
        "ttl_s",
        "offers",
    ),
    m(
        "offers",
        "of other settings",
        "if not row.stamp or row.digest != self.digest or ",
        "if not row.stamp or ",
        "offers",
    ),
    m(
        "offers",
        "asked again at once after a failure",
        "return now < until <= now + RETRY_MOST_S * _S",
        "return False",
        "offers",
    ),
    # Utilization.
    m(
        "runner",
        "utilization is that of the newest moment",
        "begin_us = max(one.at_us for one in moments) - LOOK_BACK_S * 1_000_000",
        "begin_us = max(one.at_us for one in moments) - 1",
        "runner/test_nvml.py",
    ),
    m(
        "gpus",
        "equal to the minimum is low",
        "utilization < minimum, stretch.last_ms",
        "utilization <= minimum, stretch.last_ms",
        "gpus/test_window.py",
    ),
    m(
        "gpus",
        "gaps are low",
        "unbroken = last_ms is not None and at_ms - last_ms <= MAX_GAP * interval_ms",
        "unbroken = last_ms is not None",
        "gpus/test_window.py",
    ),
    m(
        "gpus",
        "old samples are new",
        "stretch.last_ms is not None and abs(now_ms - stretch.last_ms) <= MAX_GAP * interval_ms for stretch in gpus",
        "stretch.last_ms is not None for stretch in gpus",
        "gpus/test_window.py",
    ),
    m(
        "gpus",
        "scope all: one is enough",
        "if len(low) < sum(fresh):\n            return USED",
        "",
        "gpus/test_window.py",
    ),
    m(
        "gpus",
        "unknown is low",
        "if not low or not all(fresh):\n            return UNKNOWN",
        "",
        "gpus/test_window.py",
    ),
    m(
        "gpus",
        "warm-up counts",
        "max(since_ms, window.from_ms) + window.window_ms",
        "since_ms + window.window_ms",
        "gpus/test_window.py",
    ),
    m(
        "gpus",
        "samples of others' GPUs",
        "if at_ms >= since_ms and sample.uuid in job.gpus",
        "if at_ms >= since_ms",
        "gpus/test_intake.py",
    ),
    m(
        "gpus",
        "samples from before the start",
        "if at_ms >= since_ms and sample.uuid in job.gpus",
        "if sample.uuid in job.gpus",
        "gpus/test_intake.py",
    ),
    # Counters of tasks.
    m(
        "progress",
        "moved tasks stay behind",
        "self.states[old] = self.states.get(old, 0) - count",
        "pass",
        "progress/test_counters.py progress/test_ingest.py",
    ),
    m(
        "progress",
        "no limit of groups",
        "if new_group and self.scope.groups + len(self.new_groups) >= GROUPS_MAX:",
        "if False:",
        "progress",
    ),
    m(
        "progress",
        "late news of the dead",
        "return ended_seq is not None and seq <= ended_seq and state in LIVE",
        "return False",
        "progress",
    ),
]


def source_of(mutation: Mutation, root: Path = ROOT) -> Path:
    """The file that has the text. Raises DoesNotApply unless it occurs exactly once."""
    found = [
        path for path in sorted((root / "dstackweb" / mutation.room).rglob("*.py")) if mutation.old in path.read_text()
    ]
    if len(found) != 1 or found[0].read_text().count(mutation.old) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        raise DoesNotApply(
            f"its text must occur once in dstackweb/{mutation.room}, but occurs {where}:\n{mutation.old}"
        )
    return found[0]


def tests_of(mutation: Mutation) -> list[str]:
    """Paths of the tests, below the root."""
    paths: list[Path] = []
    for name in mutation.tests.split():
        room, _, file = name.partition("/")
        found = list((ROOT / "tests" / room).rglob(file)) if file else [ROOT / "tests" / room]
        if not found or not found[0].exists():
            raise DoesNotApply(f"there are no tests {name}")
        paths += found
    return [str(path.relative_to(ROOT)) for path in paths]


def copy(folder: Path) -> Path:
    """Copy the working tree without ignored files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def caught(mutation: Mutation, root: Path) -> bool:
    """Whether its tests fail with it. Restores the copy."""
    path = source_of(mutation, root)
    text = path.read_text()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly and not gpu"]
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        done = subprocess.run(
            [*argv, *tests_of(mutation)],
            cwd=root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1) or "during collection" in done.stdout:
        raise DoesNotApply(f"pytest ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.returncode == 1


def verdict(mutation: Mutation, root: Path) -> str:
    """`caught`, or why not."""
    try:
        return "caught" if caught(mutation, root) else "SURVIVED"
    except DoesNotApply as error:
        return f"DOES NOT APPLY: {error}"


def main() -> int:
    """Prints a line for each mutation; returns the exit status."""
    parser = argparse.ArgumentParser(description="Break the product on purpose, and check that the tests fail.")
    parser.add_argument("words", nargs="*", help="only mutations whose room or name has one of them")
    parser.add_argument("--check", action="store_true", help="only check that each still applies")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    options = parser.parse_args()
    chosen = [
        one for one in MUTATIONS if not options.words or any(word in f"{one.room} {one.name}" for word in options.words)
    ]
    wrong = 0
    if options.check:
        for one in chosen:
            try:
                source_of(one)
                tests_of(one)
            except DoesNotApply as error:
                wrong += 1
                print(f"{one.room}: {one.name}: {error}")
        print(f"{len(chosen) - wrong} of {len(chosen)} mutations apply")
        return int(wrong > 0)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [copy(Path(folder) / str(number)) for number in range(options.jobs)]

        def work(number: int) -> list[tuple[Mutation, str]]:
            results = []
            for one in chosen[number :: options.jobs]:
                results.append((one, verdict(one, copies[number])))
                print(f"{one.room:10} {one.name:45} {results[-1][1]}", flush=True)
            return results

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = [result for results in pool.map(work, range(options.jobs)) for result in results]
    wrong = sum(found != "caught" for _, found in results)
    print(f"{len(results) - wrong} of {len(results)} mutations were caught")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
