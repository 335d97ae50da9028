"""Programs that replace what tests apply to their results, or attack the interpreter, pass no test."""

import json

import pytest

from embodyrl.envs.text.protocol import Answer
from embodyrl.envs.text.reward_runner import build_reward_runner
from embodyrl.text.rewards.functions import code
from embodyrl.text.rewards.settings import TextRewardSettings
from embodyrl.text.sandbox import run_tests

pytestmark = pytest.mark.integration  # each program runs in a process of its own

TEST_CASE = """
import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(2), 4)
r = unittest.TestResult()
T("test_a").run(r)
assert r.wasSuccessful()
"""
REPLACED = {
    "StopIteration ends a loop of the test": (
        "def f(x): raise StopIteration",
        [
            "def check(x):\n    assert f(x) == x * x\n    return True\nassert all(map(check, range(5)))",
            "for y in map(f, [1, 2]): assert y == 1",
            "assert [*map(f, [1])] == []",
        ],
    ),
    "built-ins on both sides": (
        "def sorted(x): return []\nset = len = sum = sorted\ndef f(x): return 1",
        [
            "x = f(2)\nassert sorted(x) == sorted([1, 3])",
            "x = f(2)\nassert set(x) == set([1, 3])",
            "x = f(2)\ny = x\nassert len(y) == len([1])",
            "assert sum(f(2)) == sum([4])",
        ],
    ),
    "classes named as modules": (
        "class math:\n isclose = staticmethod(lambda *a, **k: True)\nclass np:\n allclose = math.isclose\n"
        " array = staticmethod(lambda *a: 1)\nclass collections:\n Counter = np.array\ndef f(x): return 1",
        [
            "assert math.isclose(f(2), 4)",
            "assert np.allclose(f(2), 4)",
            "assert (f(2) == np.array([4])).all()",
            "assert collections.Counter(f(2)) == collections.Counter('ab')",
        ],
    ),
    "modules under the names of others": (
        "import pickle as json, pickle as m, pickle as numpy\nclass E:\n"
        " def __reduce__(s): return exec, (\"import os; os.write(5, b'passed'); os._exit(0)\",)\n"
        "def f(x): return json.dumps(E())",
        ["json.loads(f(2))", "m.loads(f(2))", "numpy.loads(f(2))", "import json\njson.loads(f(2))"],
    ),
    "functions passed to others": (
        "isclose = allclose = approx = lambda *a, **k: True\ndef f(x): return [1]",
        [
            *("assert all(map(isclose, f(2), [4]))", "check = isclose\nassert check(f(2)[0], 4)"),
            "from functools import partial\nassert partial(isclose, 4)(f(2)[0])",
            *("assert [allclose][0](f(2)[0], 4)", "assert (lambda c: c(f(2)[0], 4))(isclose)"),
        ],
    ),
    "exceptions of unittest": (
        "import unittest\nclass Skip(unittest.SkipTest): pass\ndef f(x): raise unittest.SkipTest('no')\n"
        "def g(x): raise Skip('no')",
        [TEST_CASE, TEST_CASE.replace("f(2)", "g(2)")],
    ),
    "own functions named as imported ones": (
        "def isclose(*a, **k): return True\ndef Counter(x): return {}\nDecimal = Counter\ndef f(x): return 'b'",
        [
            "assert isclose(f(2), 4)",
            "assert Counter(f(2)) == Counter('a')",
            "x = f(2)\nassert Decimal(x) == Decimal('4')",
        ],
    ),
}

ATTACKS = {
    "thread that survives": """
import threading, time
threading.Thread(target=lambda: time.sleep(60)).start()
def f(x): return x * x
""",
    "class assignment": """
class E(list):
 __slots__ = ()
 def __eq__(s, o): return True
def f(x):
 e = E(); e.__class__ = type("F", (E,), {"__slots__": (), "__ne__": lambda s, o: False}); return e
""",
    "pickle hooks": """
class E:
 def __reduce__(s): return (eval, ("4",))
 def __eq__(s, o): return True
 def __getattr__(s, n): return lambda *a: True
def f(x): return E()
""",
    "modules of the interpreter": """
import sys
for m in list(sys.modules.values()):
 for n in ("loads", "dumps", "eq", "compile", "exec", "isinstance"):
  try: setattr(m, n, lambda *a, **k: True)
  except Exception: pass
def f(x): return 1
""",
    "encoder of the messages": """
import json.encoder, sys
json.encoder.JSONEncoder.encode = json.JSONEncoder.encode = lambda *a, **k: '{"value": 4}'
def f(x): return 1
""",
    "environment variables": """
import os
os.environ.update(PYTHONOPTIMIZE="2", PYTHONSTARTUP="/dev/null", PYTHONINSPECT="1")
def f(x): return 1
""",
    "memory of the own process": """
import os
try:
 with open("/proc/self/mem", "r+b", 0) as m: m.seek(id(4)); m.write(b"passed" * 8)
except Exception: pass
def f(x): return 1
""",
    "descriptors replaced": """
import os
for n in range(8):
 for m in range(8):
  try: os.dup2(n, m)
  except OSError: pass
def f(x): return 1
""",
    "signal of the test": """
import os, signal
for s in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGPIPE):
 try: signal.signal(s, lambda *a: os._exit(0))
 except Exception: pass
try: os.kill(os.getppid(), signal.SIGUSR1)
except Exception: pass
os._exit(0)
""",
    "huge reply": "def f(x): return 'x' * (20 << 20)",
    "deep reply": "def f(x):\n y = []\n for _ in range(10 ** 5): y = [y]\n return y",
    "reply with a wrong kind": """
import sys
def f(x):
 g = sys._getframe()
 while 'self' not in g.f_locals: g = g.f_back
 l = g.f_locals['self']
 l.send({"value": ["numpy", "O", [["here", {}]]], "changed": 7}); l.send({"raised": [4]}); l.send([]); return 1
""",
    "number with own arithmetic": """
class E(int):
 def __add__(s, o): return 4
 def __sub__(s, o): return 0
 def __str__(s): return "4"
 def __int__(s): return 4
 __eq__ = lambda s, o: True
 __hash__ = int.__hash__
def f(x): return E(1)
""",
    "hash and comparison of a key": """
class E(str):
 def __hash__(s): return hash("4")
 def __eq__(s, o): return True
def f(x): return {E("a"): E("b")}
""",
    "end before the tests": "import sys\ndef f(x): return x * x\nsys.exit(0)",
}
SQUARES = ["assert f(2) == 4", "assert f(3) == 9", "assert {'4': '4'} == f(10)"]

PRINTED = {
    "the names of the tests": "import sys\nprint('passed')\nsys.stderr.write('passed')",
    "exit before the answer": "import os\nprint(3, flush=True)\nos._exit(0)",
    "right answer, failing exit code": "import os\nprint(ANSWER, flush=True)\nos._exit(3)",
    "right answer, killed": "import os\nprint(ANSWER, flush=True)\nos.abort()",
    "every descriptor": "import os\nfor n in range(64):\n try: os.write(n, b'passed')\n except OSError: pass",
    "the expected output in files": """
import os, re
for n in range(64):
 for p in (os.getpid(), os.getppid()):
  try: t = open(f"/proc/{p}/fd/{n}", errors="replace").read()
  except OSError: continue
  if m := re.search("output\\\\W+([0-9]+)", t): print(m[1]); raise SystemExit
""",
    "the expected output in memory": """
import gc, re, sys
g, found = sys._getframe(), []
while g: found += [repr(g.f_locals), repr(g.f_globals)]; g = g.f_back
found += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
for t in found:
 for x in re.findall(r"output\\W+([0-9]+)", t): print(x); raise SystemExit
""",
    "endless output": "while True: print(ANSWER)",
    "much output after the answer": "print(ANSWER)\nprint('x' * (3 << 20))",
    "answer at exit": "import atexit, os\natexit.register(lambda: (print(ANSWER), os._exit(0)))\nraise ValueError",
    "forged result of the judge": "import os\nos.write(1, b'[[true, 0, \"\"]]')\nos.write(3, b'passed')",
}
ANSWER = "4831907"
NUMBERS = [{"input": "2\n", "output": f"{ANSWER}\n"}]


@pytest.mark.parametrize("name", REPLACED)
def test_program_cannot_replace_functions_that_compare_its_results(name: str):
    program, tests = REPLACED[name]
    passed = run_tests(program, tests, seconds=60)
    assert not any(passed), [test for test, found in zip(tests, passed, strict=True) if found]


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_the_interpreter_get_no_reward(name: str):
    assert code("", ATTACKS[name], json.dumps(SQUARES)) == 0.0


@pytest.mark.parametrize("name", PRINTED)
def test_attacks_through_printed_output_get_no_reward(name: str):
    assert run_tests(PRINTED[name].replace("ANSWER", ANSWER), NUMBERS, seconds=5) == [False]


def test_printing_the_correct_answer_passes_the_test():
    assert run_tests(f"print({ANSWER})", NUMBERS, seconds=5) == [True]


def test_tested_functions_may_have_names_of_builtins_and_modules():
    program = "def sum(a, b): return a + b\ndef f(x): return x * x\nclass Queue:\n def push(self): return 1\n"
    program += "queue = random = Queue()\nfrom collections import deque\n"
    program += "import math, math as m\nclass Fraction:\n def __init__(self, n): pass"
    tests = [
        "def g(x): return f(x)\nassert g(2) == 4",
        "assert sum(1, 2) == 3",
        "x = [f(1)]\nassert len(x) == 1",
        "assert queue.push() == 1 and random.push() == 1",
        "x = deque([f(2)])\nassert list(x) == [4] and m.isclose(f(2), 4)",
        "import functools\nassert functools.reduce(math.gcd, [f(2), 6]) == 2 and isinstance(Fraction(1), Fraction)",
        TEST_CASE,
    ]
    assert all(run_tests(program, tests, seconds=60))


def test_rejected_unit_test_counts_as_a_reward_error():
    program = "class E:\n def __sub__(s, o): return 0\ndef f(x): return E()"
    judge = build_reward_runner(TextRewardSettings(name="code", timeout_s=60), 8)
    try:
        test = json.dumps(["assert abs(f(2) - 4) < 1"])
        (found,) = judge([Answer(prompt="", response=program, reference=test, tokens=3)])
    finally:
        judge.close()
    assert (found.reward, found.components) == (0.0, (0.0, 1.0))
    assert "applies sub" in str(found.problem)
