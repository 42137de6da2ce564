"""Times of a request: what each of them counts when it is started more than once."""

from __future__ import annotations

import pytest

from ragjax.schedule.state import Times


def test_loads_that_were_waited_for_in_vain_and_the_queue_are_no_prefill() -> None:
    times = Times(arrival=10.0)
    times.start(11.0, None)
    times.stop(13.0)  # two seconds for a load that was not done
    times.start(16.0, 16.5)  # three in the queue, and half a second for what was there
    times.first_token = 17.5
    assert times.load_ms == pytest.approx(2500)
    assert times.prefill_ms == pytest.approx(1000)
    assert times.ttft_ms == pytest.approx(7500)


def test_what_passes_after_the_first_token_changes_no_time_before_it() -> None:
    times = Times(arrival=10.0)
    times.start(11.0, 11.0)
    times.first_token = 12.0
    times.stop(15.0)
    times.start(19.0, 20.0)
    assert (times.load_ms, times.prefill_ms, times.ttft_ms) == pytest.approx((0, 1000, 2000))


def test_a_client_has_no_token_before_its_documents_are_final() -> None:
    times = Times(arrival=10.0, first_token=11.0, confirmed=14.0)
    assert times.ttft_ms == pytest.approx(4000)
