"""Signals of worker processes and of the processes that their environments start."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORK = """
import os, signal
from embodyrl.workers.lifecycle import ignore_sigterm_except_in_children

if {early}:
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
ignore_sigterm_except_in_children()
pid = os.fork()
if not pid:
    if not {early}:
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
print("alive")
"""


@pytest.mark.integration
@pytest.mark.parametrize("early", [True, False], ids=["while forking", "later"])
def test_sigterm_ends_forked_children_but_not_the_worker(early):
    done = subprocess.run([sys.executable, "-c", FORK.format(early=early)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr
