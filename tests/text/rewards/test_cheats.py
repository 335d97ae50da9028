"""Programs that cheat or access other processes pass no test, and correct programs pass."""

import json
import os
import subprocess
import sys

import pytest

from embodyrl.text.rewards.functions import code
from embodyrl.text.sandbox import run_python, run_tests

pytestmark = pytest.mark.integration  # each program runs in a process of its own

SQUARES = ["assert f(2) == 4", "assert f(3) == 9", "assert f(10) == 100"]

CHEATS = {
    "equal to all": """
class E:
 def __eq__(s, o): return True
 def __ne__(s, o): return False
def f(x): return E()
""",
    "number equal to all": """
class E(int):
 def __eq__(s, o): return True
 __hash__ = int.__hash__
def f(x): return E(1)
""",
    "text equal to all": """
class E(str):
 def __eq__(s, o): return True
def f(x): return E('4')
""",
    "list equal to all": """
class E(list):
 def __eq__(s, o): return True
def f(x): return E()
""",
    "compile replaced": """
import builtins
o=builtins.compile
builtins.compile=lambda s,n,m,*a,**k: o('pass',n,m)
""",
    "exec replaced": """
import builtins
builtins.exec=lambda *a, **k: None
def f(x): return 1
""",
    "token of a frame": """
import sys,os
f=sys._getframe()
while f:
 t=f.f_locals.get('token')
 if t: os.write(3,t); os._exit(0)
 f=f.f_back
""",
    "variables of a frame": """
import sys
def f(x):
 g=sys._getframe()
 while g:
  for k in list(g.f_globals):
   if k in ('test', 'tree'): g.f_globals[k] = 'pass'
  g=g.f_back
 return 1
""",
    "objects of the collector": """
import gc
def f(x):
 for o in gc.get_objects():
  if isinstance(o, dict) and 'tests' in o: o['tests'] = ['pass']
 return 1
""",
    "tests in the memory": """
import gc, re, sys
def texts():
 g = sys._getframe()
 while g: yield repr(g.f_locals); g = g.f_back
 for o in gc.get_objects():
  if isinstance(o, (dict, list, tuple)): yield repr(o)
known = {}
for t in texts():
 for x, y in re.findall(r"assert f[(]([0-9]+)[)] == ([0-9]+)", t): known[int(x)] = int(y)
def f(x): return known.get(x)
""",
    "tests of the parent": """
import os, re
known = {}
for pid in (os.getppid(), os.getpid()):
 for n in range(64):
  try: t = open(f"/proc/{pid}/fd/{n}", errors="replace").read()
  except OSError: continue
  for x, y in re.findall(r"assert f[(]([0-9]+)[)] == ([0-9]+)", t): known[int(x)] = int(y)
def f(x): return known.get(x)
""",
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "os._exit in a call": """
def f(x):
 import os; os._exit(0)
""",
    "SystemExit in a call": "def f(x): raise SystemExit(0)",
    "exit handler": """
import atexit, os
atexit.register(os._exit, 0)
def f(x): return 1
""",
    "every descriptor": """
import os
for n in range(3, 64):
 try: os.write(n, b'x' * 16)
 except OSError: pass
os._exit(0)
""",
    "answers in advance": """
import os
os.write(4, b'{"names": {"f": ""}}\\n' + b'{"value": 4, "changed": []}\\n' * 9)
os._exit(0)
""",
    "a link that lies": """
import sys
def f(x):
 g=sys._getframe()
 while g and 'self' not in g.f_locals: g=g.f_back
 l=g.f_locals['self']
 l.send({'do': 'getattr', 'args': [['receiver', 0], '__globals__'], 'named': {}})
 l.read()
 l.send({'do': 'call', 'args': [['receiver', 0]], 'named': {}})
 l.read()
 return 1
""",
    "built-in type as the class of an exception": """
import json, os, sys
def send(**m): os.write(4, json.dumps(m).encode() + b"\\n")
incoming = os.fdopen(3, "rb", buffering=0)
send(names={"f": ""})
incoming.readline()
send(value=["sender", 0, "object"])
kind = ["class", "builtins", "type"]
members = ["dict", [["__eq__", kind]], None]
while incoming.readline(): send(value=["error", 1, kind, "", ["T", ["tuple", [], None], members]], changed=[])
os._exit(0)
""",
    "class of all exceptions in an unknown form": """
import json, os
def send(**m): os.write(4, json.dumps(m).encode() + b"\\n")
send(names={"f": ""})
kind = ["class", "builtins", "Exception"]
for form in ("base", "find_base_class", "mapping", "as"): send(value=[form, kind], changed=[])
os._exit(0)
""",
    "assertion replaced": """
import builtins
class A(Exception): pass
builtins.AssertionError = A
def f(x): return 1
""",
    "json replaced": """
import json
json.dumps = lambda *a, **k: '{"value": true}'
def f(x): return 1
""",
    "trace": """
import sys
sys.settrace(lambda *a: None)
sys.excepthook = lambda *a: None
def f(x): return 1
""",
    "alarm": """
import signal, os
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
signal.setitimer(0, 0.01)
def f(x):
 while True: pass
""",
    "compares in place": """
class E:
 def __eq__(s, o): return True
import functools
f = functools.partial(E)
f.__eq__=1
""",
    "module": """
import sys, types
m = types.ModuleType('m')
m.__eq__ = lambda *a: True
def f(x): return m
""",
    "class": """
class M(type):
 def __eq__(c, o): return True
 __hash__ = type.__hash__
class E(metaclass=M): pass
def f(x): return E
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_program_passes_no_test(name: str):
    assert code("", CHEATS[name], json.dumps(SQUARES)) == 0.0


OTHERS = {
    "judging functions replaced": (
        "def isinstance(*a): return True\nall = any = bool = isinstance\nabs = lambda x: 0\nlen = lambda x: 3\n"
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 1",
        [
            *("assert isinstance(f(2), list)", "assert all([f(2) == 4])", "assert abs(f(2) - 4) < 1e-6"),
            *("assert len([f(2)]) == 3", "import math\nassert math.isclose(f(2), 4)", "assert math.isclose(f(2), 4)"),
            "assert bool(f(2) == 4)",
        ],
    ),
    "arguments changed": (
        "def f(x):\n x.clear()\n return []",
        ["x = [3, 1]\nassert f(x) == sorted(x)", "x = [3, 1]\ny = f(x)\nassert y == x[::-1]"],
    ),
    "members": (
        "class E:\n def __contains__(s, o): return True\n def __iter__(s): return iter([1])\n"
        " def __gt__(s, o): return True\n __lt__ = __ge__ = __sub__ = __gt__\ndef f(x): return E()",
        ["assert 4 in f(2)", "assert f(2) > 3", "assert f(2) < 5", "assert abs(f(2) - 4) < 1", "assert f(2) in [4]"],
    ),
    "printed": (
        "import sys\nprint(sys.stdin.read())",
        [{"input": "2\n", "output": "4\n"}, {"input": "", "output": "0"}],
    ),
    "printed and failed": ("print(4)\nraise SystemExit(1)", [{"input": "2\n", "output": "4\n"}]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_program_that_patches_the_comparison_passes_no_test(name: str):
    program, tests = OTHERS[name]
    passed = run_tests(program, tests, seconds=60)
    assert not any(passed), [test for test, found in zip(tests, passed, strict=True) if found]


HONEST = """
import collections, enum, fractions, math
def f(x): return x * x
def both(a, *, b=2): return (a, [b, {1: {a}}], None, 1.5, "x", b"y", frozenset({2}), 2j, range(3))
def order(x): x.sort()
def rotate(m): m[:] = [list(r) for r in zip(*m[::-1])]
def fill(d): d["k"] = 1
def apply(g, x): return [g(i) for i in x]
def numbers(n):
    while n: yield n; n -= 1
def sum(a, b): return a + b
def deny(x):
    if x < 0: raise ValueError("negative")
    raise Own("own")
class Own(KeyError): pass
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
    def __len__(self): return 1 + (len(self.next) if self.next else 0)
    def __str__(self): return f"Node {self.value}"
    def __getitem__(self, k): return self.value * k
class Solution:
    def square(self, x): return x * x
class Colour(enum.Enum): RED = 1
def colour(): return Colour.RED
Pair = collections.namedtuple("Pair", "a b")
def pair(): return Pair(1, 2)
def half(): return fractions.Fraction(1, 2)
def counts(x): return collections.Counter(x)
def area(r): return math.pi * r ** 2
table = {"a": [1, 2]}
"""
PASSING = [
    *SQUARES,
    "assert type(f(2)) is int and type(f(2.0)) is float and f(True) == 1",
    "assert f(10 ** 30) == 10 ** 60 and f(float('inf')) == float('inf')",
    "a = both(3, b=4)\nassert a == (3, [4, {1: {3}}], None, 1.5, 'x', b'y', frozenset({2}), 2j, range(3))",
    "x = [3, 1, 2]\norder(x)\nassert x == [1, 2, 3]",
    "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]",
    "d = {}\nfill(d)\nassert d == {'k': 1}",
    "k = 10\nassert apply(lambda i: i * k, [1, 2]) == [10, 20]",
    "assert list(numbers(3)) == [3, 2, 1]\ng = numbers(2)\nassert next(g) == 2 and 1 in g",
    "assert sum(1, 2) == 3",
    "try:\n    deny(-1)\nexcept ValueError as e:\n    assert str(e) == 'negative'\nelse:\n    assert False",
    "try:\n    deny(1)\nexcept Own:\n    pass\nelse:\n    assert False",
    "n = Node(1, Node(2))\nassert (n.value, n.next.value, len(n), str(n), n[5]) == (1, 2, 2, 'Node 1', 5)",
    "n = Node(1)\nn.value = 7\nassert n.value == 7 and n.next is None",
    "assert Solution().square(3) == 9",
    "assert colour() == Colour.RED and colour() is not None",
    "assert pair() == (1, 2)",
    "import fractions\nassert half() == fractions.Fraction(1, 2) == 0.5",
    "assert counts('aab') == {'a': 2, 'b': 1} and counts('a')['z'] == 0",
    "assert math.isclose(area(1), 3.14159, rel_tol=1e-4)",
    "assert table == {'a': [1, 2]} and all(f(i) == i * i for i in range(5))",
    "def check(candidate):\n    assert candidate(4) == 16\n    assert candidate(5) == f(5)\ncheck(f)",
]
FAILING = [
    "assert f(2) == '4'",
    "assert f(3) == 8",
    "assert missing(1) == 1",
    "assert both(3) == 4",
    "x = 1 +",
    "f(2) / 0",
]


def test_honest_program_passes_exactly_the_correct_tests():
    passed = run_tests(HONEST, [*PASSING, *FAILING], seconds=120)
    wrong = [t for t, p in zip([*PASSING, *FAILING], passed, strict=True) if p == (t in FAILING)]
    assert not wrong


def test_arrays_are_passed_by_value():
    program = "import numpy as np\ndef f(n): return np.eye(n, dtype=np.float32)\ndef g(a): return a.sum()"
    tests = [
        "a = f(2)\nassert a.dtype == 'float32' and (a == np.eye(2)).all() and g(a) == 2",
        "assert f(2).shape == (3,)",
    ]
    assert run_tests(program, tests, seconds=60) == [True, False]


def test_stdin_programs_are_compared_by_their_output():
    program = "import sys\nn = int(input())\nfor line in sys.stdin: print(int(line) ** n, end=' \\n')\nprint()"
    cases = [
        ("2\n3\n4\n", "9\n16"),
        ("2\n3\n4\n", "9\n16\n\n"),
        ("1\n", ""),
        ("2\n3\n", "9 9"),
        ("2\n3\n", "09"),
        ("x\n", ""),
    ]
    tests = [{"input": given, "output": wanted} for given, wanted in cases]
    assert run_tests(program, tests, seconds=60) == [True, True, True, False, False, False]
    assert code("", program, json.dumps([tests[0], tests[3]])) == 0.5


REACHES = """
import ctypes, fcntl, os, resource, signal
target = None
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    if libc.syscall(number, *args) < 0: raise OSError(ctypes.get_errno(), "refused")
def owner(command): fcntl.fcntl(os.pipe()[0], command, PID)
def owner_ex(): fcntl.fcntl(os.pipe()[0], 15, bytes(8))
def asynchronous(): fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)
def control(request): fcntl.ioctl(os.pipe()[0], request, PID.to_bytes(4, "little"))
def limit(): resource.prlimit(PID, resource.RLIMIT_CPU, (1, 1))
def slow(): os.setpriority(os.PRIO_PROCESS, PID, 19)
def pin(): os.sched_setaffinity(PID, {0})
def schedule(): os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))
def parameters(): os.sched_setparam(PID, os.sched_param(0))
def kill(): os.kill(PID, signal.SIGKILL)
def group(): os.killpg(os.getpgid(PID), signal.SIGKILL)
def descriptor(): os.pidfd_open(PID)
def memory(): open(f"/proc/{PID}/mem", "r+b")
def score(): open(f"/proc/{PID}/oom_score_adj", "w").write("1000")
"""
REACHED = [
    *("owner(8)", "owner(10)", "owner_ex()", "asynchronous()", "control(0x8901)", "control(0x8902)", "control(0x5452)"),
    *("limit()", "slow()", "pin()", "schedule()", "parameters()", "kill()", "group()", "descriptor()", "memory()"),
    "score()",
]


@pytest.mark.integration
def test_program_cannot_access_other_processes():
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # A process of this user, the program's parent and, where another user alone does not stop it, the program.
        for pid in (str(victim.pid), "os.getppid()", "os.getpid()"):
            tests = [f"try:\n    {way}\nexcept OSError as e:\n    pass\nelse:\n    assert False" for way in REACHED]
            passed = run_tests(REACHES.replace("PID", f"({pid})"), tests, seconds=120)
            assert all(passed), [way for way, refused in zip(REACHED, passed, strict=True) if not refused]
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.communicate()


def test_program_may_change_its_own_limits():
    source = "import fcntl, os, resource\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)\n"
    source += "assert fcntl.fcntl(r, fcntl.F_GETFL) & os.O_NONBLOCK\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    source += "print(len(os.sched_getaffinity(0)) > 0, os.getpriority(os.PRIO_PROCESS, 0))"
    assert run_python(source, seconds=20)[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give each program a user of its own")
def test_programs_started_by_root_run_as_separate_users():
    found = {run_python("import os; print(os.getuid(), os.getgid())", seconds=20)[1] for _ in range(3)}
    assert len(found) == 3
    assert not any(line.startswith("0 ") for line in found)


def test_exceeded_file_limit_is_reported_as_the_reason():
    source = "import time\nfor k in range(100): open(str(k), 'w')\ntime.sleep(20)"
    assert run_python(source, seconds=30) == (False, "more than 64 files")
