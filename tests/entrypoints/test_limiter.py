# SPDX-License-Identifier: Apache-2.0
"""Who is admitted when sequences are scarce, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from fastdeploy.entrypoints.openai.clients import Client
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.limiter import ConcurrencyLimiter
from tests.virtual_time import run_in_virtual_time

WAITING: Counter[str] = Counter()  # sequences that wait, by name of the client


def change_waiting(name: str, change: int) -> None:
    WAITING[name] += change
    assert WAITING[name] >= 0


def make_limiter(limit: int, max_wait_s: float = -1, client_limit: int | None = None) -> ConcurrencyLimiter:
    gauges = [Gauge(name, name, registry=CollectorRegistry()) for name in ("requests", "sequences")]
    WAITING.clear()
    own_limit = limit if client_limit is None else client_limit
    return ConcurrencyLimiter(limit, own_limit, max_wait_s, *gauges, on_wait=change_waiting)


def client(name: str, weight: float = 1.0) -> Client:
    return Client(id=name, name=name, weight=weight)


GREEDY, POLITE = client("greedy"), client("polite")


_TASKS: set[asyncio.Task[None]] = set()


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine beside the caller."""
    task = asyncio.get_running_loop().create_task(work)
    _TASKS.add(task)  # the loop itself holds only a weak reference
    task.add_done_callback(_TASKS.discard)
    return task


async def hold(
    limiter: ConcurrencyLimiter,
    who: Client,
    count: int,
    seconds: float,
    log: list[str],
    deadline_s: float | None = None,
) -> None:
    """Hold sequences for a time, and log the admission or refusal."""
    try:
        async with limiter.enter(who, count, deadline_s):
            log.append(f"{who.name}:{count}")
            await asyncio.sleep(seconds)
    except ApiError as error:
        log.append(f"{who.name}:{error.status}")


def check_empty(limiter: ConcurrencyLimiter) -> None:
    """Check that nothing is left of requests that have ended."""
    assert (limiter.num_inside, limiter.num_sequences, limiter._held, limiter._waiting) == (0, 0, {}, {})
    assert [gauge._value.get() for gauge in limiter._gauges] == [0, 0]
    assert len(limiter._turns) == len(limiter._in_turns) == 0
    assert not any(WAITING.values())


def test_waiting_sequences_are_reported_by_name_until_they_are_admitted_or_give_up() -> None:
    async def main() -> None:
        limiter, log = make_limiter(4), list[str]()
        start(hold(limiter, POLITE, 4, 1.0, log))
        start(hold(limiter, GREEDY, 3, 1.0, log))
        start(hold(limiter, GREEDY, 9, 1.0, log))  # counts at most as the limit
        start(hold(limiter, POLITE, 1, 1.0, log, deadline_s=asyncio.get_running_loop().time() + 0.5))
        await asyncio.sleep(0.25)
        assert WAITING == {"greedy": 7, "polite": 1}
        await asyncio.sleep(0.5)
        assert WAITING == {"greedy": 7, "polite": 0}
        await asyncio.sleep(0.5)
        assert WAITING == {"greedy": 4, "polite": 0}
        await asyncio.sleep(2.0)
        assert log == ["polite:4", "polite:504", "greedy:3", "greedy:9"]
        check_empty(limiter)

    run_in_virtual_time(main())


def test_sequences_are_counted_and_not_requests() -> None:
    async def main() -> None:
        limiter, log = make_limiter(512, max_wait_s=0), list[str]()
        for count in (512, 1):
            start(hold(limiter, GREEDY, count, 1, log))
        await asyncio.sleep(2)
        assert log == ["greedy:512", "greedy:429"]
        check_empty(limiter)

    run_in_virtual_time(main())


def test_a_request_larger_than_the_share_of_a_process_counts_as_the_share() -> None:
    async def main() -> None:
        limiter, log = make_limiter(4, max_wait_s=0), list[str]()
        start(hold(limiter, GREEDY, 7, 1, log))
        await asyncio.sleep(0.5)
        assert (log, limiter.num_sequences) == (["greedy:7"], 4)
        await hold(limiter, POLITE, 1, 1, log)
        await asyncio.sleep(1)
        check_empty(limiter)

    run_in_virtual_time(main())


def test_a_client_may_hold_its_share_only_and_others_pass_it() -> None:
    async def main() -> None:
        limiter, log = make_limiter(8, client_limit=7), list[str]()
        for _ in range(10):
            start(hold(limiter, GREEDY, 1, 10, log))
        await asyncio.sleep(1)
        assert log == ["greedy:1"] * 7
        await hold(limiter, POLITE, 1, 1, log)
        assert log == ["greedy:1"] * 7 + ["polite:1"]
        await asyncio.sleep(30)
        assert Counter(log) == {"greedy:1": 10, "polite:1": 1}
        check_empty(limiter)

    run_in_virtual_time(main())


def test_the_error_says_which_limit_it_is() -> None:
    async def main() -> None:
        limiter = make_limiter(8, max_wait_s=0, client_limit=6)
        async with limiter.enter(GREEDY, 5):
            with pytest.raises(ApiError, match="5 sequences of this client are running, its maximum is 6"):
                async with limiter.enter(GREEDY, 2):
                    pass
            with pytest.raises(ApiError, match="5 sequences are running, the maximum is 8") as caught:
                async with limiter.enter(POLITE, 4):
                    pass
        assert (caught.value.reason, caught.value.headers) == ("concurrency", {"Retry-After": "1"})
        check_empty(limiter)

    run_in_virtual_time(main())


def test_clients_take_turns_whatever_the_number_of_their_requests() -> None:
    async def main() -> None:
        limiter, log = make_limiter(1), list[str]()
        for _ in range(6):
            start(hold(limiter, GREEDY, 1, 1, log))
        await asyncio.sleep(0.5)
        for _ in range(2):
            start(hold(limiter, POLITE, 1, 1, log))
        await asyncio.sleep(20)
        assert log == ["greedy:1", "greedy:1", "polite:1", "greedy:1", "polite:1", "greedy:1", "greedy:1", "greedy:1"]
        check_empty(limiter)

    run_in_virtual_time(main())


def test_a_request_of_many_sequences_takes_as_many_turns() -> None:
    async def main() -> None:
        limiter, log = make_limiter(4), list[str]()
        start(hold(limiter, client("first"), 4, 1, log))
        await asyncio.sleep(0)
        for _ in range(2):
            start(hold(limiter, GREEDY, 4, 1, log))
        for _ in range(5):
            start(hold(limiter, POLITE, 1, 1, log))
        await asyncio.sleep(20)
        assert log == ["first:4", "greedy:4", *["polite:1"] * 4, "greedy:4", "polite:1"]
        check_empty(limiter)

    run_in_virtual_time(main())


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    async def main() -> None:
        limiter, log = make_limiter(4), list[str]()

        async def small() -> None:
            for _ in range(50):
                await hold(limiter, POLITE, 1, 1, log)

        for _ in range(6):
            start(small())
        await asyncio.sleep(2.5)
        num_before = len(log)
        await hold(limiter, GREEDY, 4, 1, log)
        assert log[num_before:].index("greedy:4") <= 4
        await asyncio.sleep(500)
        check_empty(limiter)

    run_in_virtual_time(main())


@pytest.mark.parametrize(("max_wait_s", "deadline_s", "expected", "at_s"), [(3, None, 429, 3), (9, 2, 504, 2)])
def test_waiting_ends_at_the_maximum_or_the_deadline(
    max_wait_s: float, deadline_s: float | None, expected: int, at_s: float
) -> None:
    async def main() -> None:
        limiter, log = make_limiter(1, max_wait_s), list[str]()
        start(hold(limiter, GREEDY, 1, 20, log))
        await asyncio.sleep(0)
        await hold(limiter, POLITE, 1, 1, log, deadline_s)
        assert log == ["greedy:1", f"polite:{expected}"]
        assert asyncio.get_running_loop().time() == pytest.approx(at_s)
        await asyncio.sleep(30)
        check_empty(limiter)

    run_in_virtual_time(main())


def test_what_waits_behind_a_large_request_is_admitted_when_that_gives_up() -> None:
    async def main() -> None:
        limiter, log = make_limiter(4), list[str]()
        start(hold(limiter, client("first"), 3, 20, log))
        await asyncio.sleep(0)
        large = start(hold(limiter, GREEDY, 4, 1, log))
        await asyncio.sleep(0)
        for who in (GREEDY, POLITE):
            start(hold(limiter, who, 1, 1, log))
        await asyncio.sleep(5)
        assert log == ["first:3"]
        large.cancel()
        await asyncio.sleep(5)
        assert sorted(log) == ["first:3", "greedy:1", "polite:1"]
        await asyncio.sleep(30)
        check_empty(limiter)

    run_in_virtual_time(main())


def test_a_request_that_is_cancelled_as_it_is_admitted_holds_nothing() -> None:
    async def main() -> None:
        limiter, log = make_limiter(1), list[str]()
        async with limiter.enter(GREEDY, 1):
            waiting = start(hold(limiter, POLITE, 1, 1, log))
            await asyncio.sleep(1)
        assert limiter.num_sequences == 1, "the waiting request is admitted"
        waiting.cancel()
        await asyncio.sleep(1)
        assert log == []
        check_empty(limiter)

    run_in_virtual_time(main())


@dataclass
class Simulation:
    """Random requests of several clients, and what must hold after each event."""

    random: random.Random
    limiter: ConcurrencyLimiter = field(init=False)
    inside: dict[int, tuple[Client, int]] = field(default_factory=dict)
    waiting: dict[int, tuple[Client, int]] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.limit = self.random.randint(1, 12)
        self.client_limit = self.random.randint(1, self.limit)
        self.max_wait_s = self.random.choice([0, -1, self.random.uniform(0.1, 20)])
        self.limiter = make_limiter(self.limit, self.max_wait_s, self.client_limit)

    async def run(self) -> None:
        clients = [client(str(i), self.random.choice([0.5, 1, 3])) for i in range(self.random.randint(1, 5))]
        num_requests = self.random.randint(1, 40)
        tasks = []
        for number in range(num_requests):
            tasks.append(start(self.request(number, self.random.choice(clients))))
            if self.random.random() < 0.15:
                asyncio.get_running_loop().call_later(self.random.uniform(0, 9), self.random.choice(tasks).cancel)
            await asyncio.sleep(self.random.choice([0, 0, self.random.uniform(0, 3)]))
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert self.results.total() == num_requests
        if self.max_wait_s == -1 and not self.results["cancelled"]:
            assert self.results["429"] == 0
        check_empty(self.limiter)

    async def request(self, number: int, who: Client) -> None:
        loop = asyncio.get_running_loop()
        size = self.random.randint(1, self.limit + 2)
        count, arrival_s = min(size, self.client_limit), loop.time()
        deadline_s = arrival_s + self.random.uniform(0.1, 15) if self.random.random() < 0.3 else None
        blocked = not self.fits(who, count)
        self.waiting[number] = (who, count)
        try:
            async with self.limiter.enter(who, size, deadline_s):
                self.check_admission(number)
                await asyncio.sleep(self.random.uniform(0, 4))
                del self.inside[number]
            self.results["served"] += 1
        except ApiError as error:
            self.results[str(error.status)] += 1
            self.check_refusal(error, loop.time() - arrival_s, deadline_s, blocked)
        except asyncio.CancelledError:
            self.results["cancelled"] += 1
            self.inside.pop(number, None)
        finally:
            self.waiting.pop(number, None)

    def check_admission(self, number: int) -> None:
        who, count = self.waiting[number]
        mine = [other for other, (owner, _) in self.waiting.items() if owner is who]
        assert mine[0] == number, "requests of a client are admitted in their order"
        assert self.fits(who, count)
        self.inside[number] = self.waiting.pop(number)

    def check_refusal(self, error: ApiError, waited_s: float, deadline_s: float | None, blocked: bool) -> None:
        if error.status == 429 and self.max_wait_s == 0:
            assert blocked and waited_s == 0
        elif error.status == 429:
            assert waited_s == pytest.approx(self.max_wait_s)
        else:
            assert error.status == 504 and deadline_s is not None
            assert asyncio.get_running_loop().time() == pytest.approx(deadline_s)

    def fits(self, who: Client, count: int) -> bool:
        """Whether a request fits beside those inside, by our own books."""
        mine = sum(held for owner, held in self.inside.values() if owner is who)
        total = sum(held for _, held in self.inside.values())
        return mine + count <= self.client_limit and total + count <= self.limit


def simulate(seed: int) -> Counter[str]:
    simulation = Simulation(random.Random(seed))
    run_in_virtual_time(simulation.run())
    return simulation.results


def test_random_requests_respect_all_limits_and_leave_nothing() -> None:
    results = sum((simulate(seed) for seed in range(400)), Counter[str]())
    assert all(results[kind] > 20 for kind in ("served", "429", "504", "cancelled"))


@pytest.mark.nightly
def test_a_thousand_random_loads_respect_all_limits_and_leave_nothing() -> None:
    for seed in range(1000, 2000):
        simulate(seed)


def check_proportions(seed: int) -> None:
    """Check that clients that always wait are served in proportion to their weights, whatever their requests' size."""
    source = random.Random(seed)
    limit = source.randint(1, 16)
    clients = [client(str(i), source.choice([0.25, 1, 2, 5])) for i in range(source.randint(2, 4))]
    limiter, served = make_limiter(limit), dict.fromkeys((who.id for who in clients), 0)

    async def worker(who: Client) -> None:
        while True:
            count = source.randint(1, limit)
            async with limiter.enter(who, count):
                served[who.id] += count
                await asyncio.sleep(source.uniform(0.1, 2))

    async def main() -> None:
        for who in clients:
            for _ in range(limit + 1):  # one of them waits at any time
                start(worker(who))
        await asyncio.sleep(100)
        shares = [served[who.id] / who.weight for who in clients]
        slack = [limit * 2 / who.weight for who in clients]
        for i, share in enumerate(shares):
            for k in range(i):
                assert abs(share - shares[k]) <= slack[i] + slack[k], (served, clients)

    run_in_virtual_time(main())


def test_busy_clients_are_served_in_proportion_to_their_weights() -> None:
    for seed in range(60):
        check_proportions(seed)


@pytest.mark.nightly
def test_a_thousand_sets_of_busy_clients_are_served_in_proportion_to_their_weights() -> None:
    for seed in range(1000, 2000):
        check_proportions(seed)
