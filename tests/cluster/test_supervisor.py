"""How the death of a worker is told."""

import pytest

from embodyrl.cluster.protocol import WorkerDied
from embodyrl.cluster.supervisor import _fatal


@pytest.mark.parametrize(("code", "shown"), [(1, True), (6, False)], ids=["bug", "error with a cause"])
def test_only_an_error_without_a_cause_shows_its_traceback(code: int, shown: bool):
    died = WorkerDied(reason="raised x", log="policy.log", traceback="Traceback ...", exit_code=code)
    error = _fatal("worker policy raised x. Log: policy.log", died)
    assert ("Traceback" in str(error)) == shown
    assert "Log: policy.log" in str(error)
    assert error.exit_code == (4 if shown else code)
