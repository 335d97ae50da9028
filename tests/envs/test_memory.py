"""The number of loaded tasks per worker."""

from __future__ import annotations

from embodyrl.envs.factory import get_max_tasks_in_memory
from embodyrl.files import available_bytes


def test_every_worker_has_memory_for_at_least_one_task():
    gigabyte = 10**9
    assert get_max_tasks_in_memory(gigabyte, 10**9) == 1
    assert get_max_tasks_in_memory(gigabyte, 1) >= get_max_tasks_in_memory(gigabyte, 4) >= 1
    assert (
        get_max_tasks_in_memory(gigabyte // 10, 1) > get_max_tasks_in_memory(gigabyte, 1)
        or available_bytes() < gigabyte // 4
    )
