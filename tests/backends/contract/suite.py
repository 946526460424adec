"""The conformance suite of kinds that start instances (docs/writing-a-backend.md).

A kind's tests subclass `CloudContract` and give it the fixture `engine`. Each kind passes all of it, with its real
engine where there is one.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import (
    Availability,
    Cloud,
    CloudInstance,
    InstanceEnd,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    SourceFailed,
    SourceFailure,
    SourceReading,
    SourceState,
)
from dstackweb.offers import sources, store
from dstackweb.spec.effective import Requirements
from tests.backends.contract.engine import DEPLOYMENT, Engine
from tests.support import eventually

ALIVE = (InstanceState.STARTING, InstanceState.RUNNING)
ENDED = (InstanceState.STOPPED, InstanceState.ENDING, InstanceState.GONE)
OTHER = "e" * 20
"""Another deployment with the same engine."""


def listed(code: Cloud, engine: Engine, deployment: str = DEPLOYMENT) -> dict[str, CloudInstance]:
    """All instances of a deployment, by cloud ID; one that is listed twice is an error."""
    found = code.instances(engine.region, deployment)
    by_id = {machine.cloud_id: machine for machine in found}
    assert len(by_id) == len(found)
    return by_id


def until(code: Cloud, engine: Engine, cloud_id: str, *states: InstanceState) -> CloudInstance:
    """The instance, once it is listed in one of these states."""
    eventually(lambda: listed(code, engine)[cloud_id].state in states)
    return listed(code, engine)[cloud_id]


def until_gone(code: Cloud, engine: Engine, cloud_id: str) -> CloudInstance | None:
    """Wait until it is confirmed gone; None if it is no longer listed."""
    eventually(lambda: cloud_id not in (there := listed(code, engine)) or there[cloud_id].state == InstanceState.GONE)
    return listed(code, engine).get(cloud_id)


class CloudContract:
    """Each test says what the scheduler relies on."""

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("the kind's tests have a fixture `engine`")

    @pytest.fixture
    def code(self, engine: Engine) -> Cloud:
        return engine.driver()

    def test_an_order_starts_an_instance_that_says_whose_it_is(self, code: Cloud, engine: Engine) -> None:
        assert engine.region in code.regions()
        wanted, before = engine.order(), timezone.now()
        started = code.launch(wanted)
        assert (started.instance, started.region) == (wanted.instance, engine.region)
        assert started.state in ALIVE
        assert started.cloud_id
        assert engine.started() == 1
        running = until(code, engine, started.cloud_id, InstanceState.RUNNING)
        assert (running.instance, running.region, running.why) == (wanted.instance, engine.region, "")
        assert running.launched_at is not None
        assert running.launched_at.tzinfo is not None
        assert abs(running.launched_at - before) < dt.timedelta(minutes=5), "orphans are found by their age"
        assert listed(engine.driver(), engine)[started.cloud_id] == running, "no two looks differ"

    def test_a_doubled_order_finds_the_first(self, code: Cloud, engine: Engine) -> None:
        wanted = engine.order()
        first = code.launch(wanted)
        assert code.launch(wanted).cloud_id == engine.driver().launch(wanted).cloud_id == first.cloud_id
        assert engine.started() == len(listed(code, engine)) == 1

    @pytest.mark.django_db(transaction=True)
    def test_an_order_by_several_at_once_is_one_instance(self, engine: Engine) -> None:
        wanted = engine.order()

        def launch(code: Cloud) -> str:
            try:
                return code.launch(wanted).cloud_id
            finally:
                connection.close()

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(launch, [engine.driver() for _ in range(4)]))) == 1
        assert engine.started() == 1

    def test_an_order_whose_answer_was_lost_finds_its_instance(self, code: Cloud, engine: Engine) -> None:
        wanted = engine.order()
        with engine.losing_answers(), pytest.raises(SourceFailed):
            code.launch(wanted)
        eventually(lambda: engine.started() == 1)
        found = engine.driver().launch(wanted)
        assert found.instance == wanted.instance
        assert engine.started() == len(listed(code, engine)) == 1

    def test_an_order_whose_instance_has_ended_starts_no_other(self, code: Cloud, engine: Engine) -> None:
        wanted = engine.order()
        started = code.launch(wanted)
        until(code, engine, started.cloud_id, InstanceState.RUNNING)
        code.terminate(engine.region, [started.cloud_id])
        until_gone(code, engine, started.cloud_id)
        with suppress(LaunchFailed):
            assert engine.driver().launch(wanted).state in ENDED
        assert engine.started() == 1

    def test_an_order_without_capacity_is_refused_and_leaves_nothing(self, code: Cloud, engine: Engine) -> None:
        with pytest.raises(LaunchFailed) as refused:
            code.launch(engine.refused())
        assert refused.value.code in (LaunchFailure.NO_CAPACITY, LaunchFailure.QUOTA)
        assert engine.started() == 0
        assert not [machine for machine in listed(code, engine).values() if machine.state in ALIVE]

    @pytest.mark.parametrize("trouble", [SourceFailure.UNREACHABLE, SourceFailure.THROTTLED])
    def test_what_is_unknown_is_said_and_changes_nothing(
        self, code: Cloud, engine: Engine, trouble: SourceFailure
    ) -> None:
        started = code.launch(engine.order())
        until(code, engine, started.cloud_id, InstanceState.RUNNING)
        troubled: dict[SourceFailure, Callable[[], AbstractContextManager[None] | None]] = {
            SourceFailure.UNREACHABLE: engine.unreachable,
            SourceFailure.THROTTLED: engine.throttling,
        }
        meanwhile = troubled[trouble]()
        if meanwhile is None:
            return
        late = engine.order()
        with meanwhile:
            for call in (
                lambda: code.launch(late),
                lambda: code.instances(engine.region, DEPLOYMENT),
                lambda: code.terminate(engine.region, [started.cloud_id]),
            ):
                with pytest.raises(SourceFailed) as failed:
                    call()
                assert failed.value.code == trouble
        assert eventually(lambda: listed(code, engine))[started.cloud_id].state == InstanceState.RUNNING
        assert {machine.instance for machine in listed(code, engine).values()} == {started.instance}
        assert code.launch(late).instance == late.instance

    def test_a_terminated_instance_ends_and_others_go_on(self, code: Cloud, engine: Engine) -> None:
        doomed, stays = (code.launch(engine.order()) for _ in range(2))
        for each in (doomed, stays):
            until(code, engine, each.cloud_id, InstanceState.RUNNING)
        code.terminate(engine.region, [doomed.cloud_id])
        until_gone(code, engine, doomed.cloud_id)
        code.terminate(engine.region, [doomed.cloud_id])
        assert listed(code, engine)[stays.cloud_id].state == InstanceState.RUNNING

    def test_unknown_instances_are_terminated_without_a_word(self, code: Cloud, engine: Engine) -> None:
        code.terminate(engine.region, [])
        started = code.launch(engine.order())
        unknown = f"{started.cloud_id[:-4]}{'ffff' if not started.cloud_id.endswith('ffff') else '0000'}"
        code.terminate(engine.region, [unknown])
        code.terminate(engine.region, [unknown, started.cloud_id])
        until_gone(code, engine, started.cloud_id)

    def test_instances_of_other_deployments_are_neither_listed_nor_ended(self, code: Cloud, engine: Engine) -> None:
        ours, theirs = code.launch(engine.order()), code.launch(engine.order(deployment=OTHER))
        assert ours.cloud_id != theirs.cloud_id
        assert set(listed(code, engine)) == {ours.cloud_id}
        assert set(listed(code, engine, OTHER)) == {theirs.cloud_id}
        code.terminate(engine.region, [ours.cloud_id])
        until_gone(code, engine, ours.cloud_id)
        assert listed(code, engine, OTHER)[theirs.cloud_id].state in ALIVE

    def test_an_instance_that_ended_by_itself_is_gone(self, code: Cloud, engine: Engine) -> None:
        started = code.launch(engine.order(engine.ends))
        until_gone(code, engine, started.cloud_id)
        assert engine.started() == 1

    def test_an_instance_that_a_person_ended_says_why(self, code: Cloud, engine: Engine) -> None:
        started = code.launch(engine.order())
        until(code, engine, started.cloud_id, InstanceState.RUNNING)
        engine.end(started.cloud_id)
        ended = until(code, engine, started.cloud_id, *ENDED)
        assert ended.why in (InstanceEnd.CLOUD, InstanceEnd.INTERRUPTED)
        if ended.state == InstanceState.STOPPED:
            code.terminate(engine.region, [started.cloud_id])
        until_gone(code, engine, started.cloud_id)

    def test_its_offers_come_from_values_that_survive_the_cache(self, code: Cloud, engine: Engine) -> None:
        if not sources.is_sourced(code):
            assert code.offers(Requirements())  # type: ignore[attr-defined]
            return
        readings = {
            key: SourceReading(
                SourceState.FRESH, store.checked(code.fetch(key), code.sources[key.source].type), timezone.now()
            )
            for key in code.wanted()
        }
        offers = code.join(readings, Requirements())
        usable = [offer for offer in offers if offer.availability is Availability.AVAILABLE]
        assert usable, offers
        assert {offer.region for offer in offers} <= set(code.regions())
        assert code.launch(engine.order(region=usable[0].region, instance_type=usable[0].instance_type)).cloud_id

    def test_what_is_ordered_is_taken_from_what_was_read_as_the_engine_takes_it(
        self, code: Cloud, engine: Engine
    ) -> None:
        """Of a kind that counts room: its `take` foresees what the next reading shows."""
        if not registry.is_counted(code):
            return

        def read() -> Any:
            return store.checked(code.fetch(code.key), code.sources[code.key.source].type)

        def fits(value: Any) -> int:
            offers = code.join({code.key: SourceReading(SourceState.FRESH, value, timezone.now())}, needs)
            return sum(offer.detail["fits"] for offer in offers if offer.region == engine.region)

        needs = Requirements(cpu_min=3, memory_min_mib=100)
        foreseen = read()
        before = fits(foreseen)
        for size in ((1, 200), (3, 100), (1, 100)):
            wanted = engine.order(cpus=size[0], memory_mib=size[1])
            foreseen = code.take(foreseen, wanted)
            assert foreseen is not None
            until(code, engine, code.launch(wanted).cloud_id, InstanceState.RUNNING)
        assert fits(foreseen) < before
        eventually(lambda: fits(read()) == fits(foreseen))
        assert store.checked(foreseen, code.sources[code.key.source].type) == foreseen
        while (rest := code.take(foreseen, engine.order(cpus=1, memory_mib=100))) is not None:
            foreseen = rest
        assert fits(foreseen) == 0

    def test_an_order_that_others_have_the_room_of_says_so(self, code: Cloud, engine: Engine) -> None:
        """It is refused as NO_ROOM, or waits in the engine and says that it lacks room."""
        if not registry.is_counted(code):
            return
        value = code.fetch(code.key)
        while (rest := code.take(value, engine.order(cpus=1, memory_mib=100))) is not None:
            until(code, engine, code.launch(engine.order(cpus=1, memory_mib=100)).cloud_id, InstanceState.RUNNING)
            value = rest
        late: CloudInstance | LaunchFailed
        try:
            late = code.launch(engine.order(cpus=1, memory_mib=100))
        except LaunchFailed as refusal:
            late = refusal
        if isinstance(late, LaunchFailed):
            assert late.code == LaunchFailure.NO_ROOM
        else:
            cloud_id = late.cloud_id
            eventually(lambda: listed(code, engine)[cloud_id].lacks_room)
        assert code.take(code.fetch(code.key), engine.order(cpus=1, memory_mib=100)) is None

    def test_unknown_offers_are_an_error_and_not_none(self, code: Cloud, engine: Engine) -> None:
        if not sources.is_sourced(code):
            return
        unread = {key: SourceReading(SourceState.FAILED) for key in code.wanted()}
        with pytest.raises(SourceFailed):
            code.join(unread, Requirements())
        with engine.unreachable(), pytest.raises(SourceFailed):
            code.fetch(code.wanted()[0])
