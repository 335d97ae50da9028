"""Programs run in the sandbox: results, time, memory, files, and what they cannot see."""

import json

from embodyrl.rewards.functions import code
from embodyrl.sandbox import run_python


def test_share_of_passed_tests():
    answer = "Here:\n```python\ndef f(x):\n    return x * 2\n```\n"
    assert code("", answer, json.dumps(["assert f(2) == 4", "assert f(0) == 1"])) == 0.5


def test_limits_end_a_program():
    assert run_python("print(6 * 7)", seconds=20) == (True, "42\n")
    assert run_python("while True: pass", seconds=1) == (False, "stopped after 1 s")
    ended, why = run_python("x = 'a' * (1 << 31)", seconds=20)
    assert (ended, why) == (False, "MemoryError")
    ended, why = run_python("open('f', 'w').write('a' * (4 << 20))", seconds=20)
    assert not ended, why


def test_a_program_sees_no_environment(monkeypatch):
    monkeypatch.setenv("A_SECRET", "value")
    assert run_python("import os; print('A_SECRET' in os.environ)", seconds=20) == (True, "False\n")
