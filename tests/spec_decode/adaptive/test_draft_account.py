# SPDX-License-Identifier: Apache-2.0
"""What drafts may lose, when they are tried again after that, and what things cost that are done again and again."""

from __future__ import annotations

import pytest

from fastdeploy.spec_decode.adaptive.draft_account import (
    COST_OUTLIER,
    COST_RATE,
    FIRST_TIMES,
    MOST_SAVED,
    MOST_SAVED_ALONE,
    REPAYMENTS,
    SAVED_SHARE,
    STAKE,
    START,
    START_ALONE,
    TRIAL,
    Account,
    Price,
)

ALONE = START + START_ALONE  # steps that a new account of one request may lose


def num_bookings_until_closed(account: Account, loss_s: float, step_s: float = 1.0, num_requests: int = 1) -> int:
    """Lose so much again and again; the booking counts that closes the account."""
    count = 0
    while account.is_open and count < 1000:
        account.book(-loss_s, step_s, num_requests)
        count += 1
    return count


def opens_after(account: Account, seconds: float, step_s: float = 1.0) -> bool:
    """Return True if a closed account opens after so many seconds, to a hundredth, and not before."""
    account.save(seconds - 0.01, step_s)
    is_early = account.is_open
    account.save(0.02, step_s)
    return account.is_open and not is_early


def closed_account(debt_s: float) -> Account:
    """Lose what a new account may lose where a step takes one second, and so much more."""
    account = Account()
    account.book(-ALONE - debt_s, 1.0, 1)
    return account


def test_a_new_account_is_open_and_on_trial_for_its_first_bookings() -> None:
    account = Account()
    assert account.is_open and account.is_on_trial
    on_trial = []
    for _ in range(TRIAL):
        account.book(0.0, 1.0, 1)
        on_trial.append(account.is_on_trial)
    assert on_trial == [True] * (TRIAL - 1) + [False]


@pytest.mark.parametrize("num_requests", [1, 64])
def test_a_new_account_may_lose_its_start_and_closes_with_more(num_requests: int) -> None:
    assert (
        num_bookings_until_closed(Account(), 0.25, 0.5, num_requests)
        == (START + START_ALONE / num_requests) * 0.5 // 0.25 + 1
    )


@pytest.mark.parametrize("num_requests", [1, 4, 12])
def test_of_what_was_gained_little_is_kept_for_worse_times(num_requests: int) -> None:
    account = Account()
    account.book(-ALONE / 2 * 0.5, 0.5, num_requests)
    for _ in range(100):
        account.book(10.0, 0.5, num_requests)
    most_saved = MOST_SAVED + MOST_SAVED_ALONE / num_requests
    assert num_bookings_until_closed(account, 0.5, 0.5, num_requests) == most_saved // 1 + 1


def test_a_closed_account_opens_when_its_debt_and_a_stake_are_saved() -> None:
    assert opens_after(closed_account(debt_s=1.0), (1.0 + STAKE) / SAVED_SHARE)
    assert opens_after(closed_account(debt_s=1.0), (1.0 + STAKE * 0.25) / SAVED_SHARE, step_s=0.25)


def test_an_account_that_opens_again_is_on_trial_and_may_lose_its_stake() -> None:
    account = Account()
    assert num_bookings_until_closed(account, 0.25) > TRIAL
    account.save((0.25 + STAKE) / SAVED_SHARE + 0.01, 1.0)
    on_trial = [account.is_on_trial]
    for _ in range(TRIAL - 1):
        account.book(0.0, 1.0, 1)
        on_trial.append(account.is_on_trial)
    assert on_trial == [True] * (TRIAL - 1) + [False]
    assert num_bookings_until_closed(account, 1.0) == STAKE + 1


def test_drafts_that_never_pay_lose_a_start_and_a_share_of_the_time() -> None:
    account, lost_s, total_s, num_trials = Account(), 0.0, 0.0, 0
    for _ in range(100_000):
        if account.is_open:
            account.book(-5.0, 1.0, 1)
            lost_s += 5.0
            num_trials += 1
        account.save(1.0, 1.0)
        total_s += 1.0
    most_s = ALONE + SAVED_SHARE * total_s + 5.0
    assert most_s - 2 * 5.0 < lost_s <= most_s and num_trials > 50


def test_an_open_account_saves_nothing() -> None:
    account = Account()
    account.save(10_000.0, 1.0)
    account.book(-ALONE, 1.0, 1)
    account.save(10_000.0, 1.0)
    assert account.is_open
    account.book(-0.5, 1.0, 1)
    assert not account.is_open and opens_after(account, (0.5 + STAKE) / SAVED_SHARE)


def test_what_is_owed_is_paid_in_parts_while_the_account_is_open() -> None:
    account = Account()
    account.owe(ALONE / 2)
    account.book(-ALONE + ALONE / 2 / REPAYMENTS, 1.0, 1)  # a part takes the rest
    assert account.is_open
    account.book(0.0, 1.0, 1)
    assert not account.is_open


def test_what_was_paid_is_no_longer_owed() -> None:
    account = Account()
    account.owe(ALONE / 2)
    for _ in range(1000):
        account.book(0.0, 1.0, 1)
    assert account.is_open
    account.book(-ALONE / 2 - 1.0, 1.0, 1)
    assert not account.is_open and opens_after(account, (1.0 + STAKE) / SAVED_SHARE)


def test_the_rest_of_what_is_owed_is_paid_when_the_account_closes() -> None:
    account = Account()
    account.owe(3.0)
    account.book(-ALONE - 1.0, 1.0, 1)
    assert not account.is_open and opens_after(account, (3.0 + 1.0 + STAKE) / SAVED_SHARE)
    assert num_bookings_until_closed(account, 0.5) == STAKE / 0.5 + 1  # nothing is owed from before


def test_a_price_is_the_least_of_the_first_times() -> None:
    price, seen = Price(), []
    for cost_s in (5.0, 7.0, 3.0, 4.0, 9.0, 9.0, 9.0, 2.0):
        price.learn(cost_s)
        seen.append(price.seconds)
    assert len(seen) == FIRST_TIMES and seen == [5.0, 5.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0]


def test_a_price_then_follows_the_mean_and_believes_no_outlier() -> None:
    price = Price()
    for _ in range(FIRST_TIMES):
        price.learn(1.0)
    price.learn(3.0)
    dearer_s = 1.0 + COST_RATE * 2.0
    assert price.seconds == pytest.approx(dearer_s)
    price.learn(1000.0)
    assert price.seconds == pytest.approx(dearer_s + COST_RATE * (COST_OUTLIER - 1) * dearer_s)
    for _ in range(300):
        price.learn(0.5)
    assert price.seconds == pytest.approx(0.5, rel=0.01)
