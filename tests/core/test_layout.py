"""Pages of layers over the units of whole pages: each unit holds one page of one layer, and few pages are enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.core.passes import LayerLayout, LayerTable, most_containers

PAGE = 16


@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_unit_holds_two_pages_and_all_tokens_have_one(some: list[int], arrays: int, seed: int) -> None:
    kept = np.random.default_rng(seed).permutation(np.array(some * arrays, np.int32))
    layout = LayerLayout(kept, len(some))
    containers = [3 + 2 * i for i in range(layout.containers(PAGE))]
    table = layout.table(containers, PAGE)
    used = table.seen_LS > 0
    layers = np.broadcast_to(np.arange(len(kept))[:, None], used.shape)
    units = list(zip(table.page_LS[used].tolist(), table.lender_LS[used].tolist(), strict=True))
    assert len(set(units)) == len(units) and {page for page, _ in units} <= set(containers)
    assert (table.lender_LS[used] // len(some) == layers[used] // len(some)).all(), "a unit of another array"
    assert table.seen_LS.sum(1).tolist() == kept.tolist()
    assert (np.diff(table.seen_LS) <= 0).all() and ((table.seen_LS[:, :-1] == PAGE) | ~used[:, 1:]).all()
    assert table.lender_LS.min() >= 0 and table.lender_LS.max() < len(kept) and np.isin(table.page_LS, containers).all()
    with pytest.raises(ValueError, match="do not hold"):
        layout.table(containers[:-1], PAGE)


@given(st.integers(0, 2**32 - 1))
def test_reserved_containers_are_enough_whatever_layers_keep(seed: int) -> None:
    random = np.random.default_rng(seed)
    reach, arrays, window, tokens = random.integers(1, 5), random.integers(1, 4), 8, int(random.integers(60, 400))
    layers, budget = int(reach * arrays), int(random.integers(window + 1, tokens))
    kept = np.full(layers, window)
    while (left := layers * budget - kept.sum()) > 0:
        at = random.integers(layers)
        kept[at] += min(left, int(random.integers(1, tokens)), tokens - kept[at])
    most = most_containers(budget, window, tokens, layers, int(reach), PAGE)
    assert -(-budget // PAGE) <= LayerLayout(kept.astype(np.int32), int(reach)).containers(PAGE) <= most


def test_one_array_wastes_less_than_a_page_and_an_array_for_each_stage_most_of_it() -> None:
    kept = np.array([90, 70, 40, 8], np.int32)  # 52 in the mean
    assert LayerLayout(kept, 4).containers(PAGE) == 4 and most_containers(52, 8, 200, 4, 4, PAGE) == 4
    assert LayerLayout(kept, 2).containers(PAGE) == 6  # 6 and 5 pages
    assert LayerLayout(kept, 1).containers(PAGE) == 6


def test_common_entries_are_in_each_layers_own_units() -> None:
    table = LayerTable.common(np.array([5, 9], np.int32), 3, PAGE)
    assert table.page_LS.tolist() == [[5, 9]] * 3 and table.lender_LS.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (table.seen_LS == PAGE).all()
