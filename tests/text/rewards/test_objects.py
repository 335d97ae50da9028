"""Objects of programs in tests: operators, attributes and in-place changes as in plain Python, and no more."""

import os
import signal

import pytest

from embodyrl.text.sandboxed_calls import serve_program
from embodyrl.text.sandboxed_tests import find_problems, run_test

pytestmark = pytest.mark.integration  # each program runs in a process of its own


def outcome(program: str, test: str) -> bool | str:
    """Return True if a test passes in a process of its own, False if it fails, or why it is rejected."""
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ask)
            os.close(answered)
            serve_program(program, asked, answer)
        finally:
            os._exit(0)
    os.close(asked)
    os.close(answer)
    try:
        return run_test(test, answered, ask) or True
    except Exception:
        return False
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


VECTOR = """
from dataclasses import dataclass
@dataclass(order=True)
class P:
    x: int
    y: int = 0
def mid(a, b): return P((a.x + b.x) // 2, (a.y + b.y) // 2)
class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __mul__(s, k): return V(s.x * k)
    __rmul__ = __mul__
    def __eq__(s, o): return s.x == o.x
    def __lt__(s, o): return s.x < o.x
    def __neg__(s): return V(-s.x)
    def __hash__(s): return hash(s.x)
    def __repr__(s): return f"V({s.x})"
    def __int__(s): return s.x
    __index__ = __abs__ = __int__
    def __contains__(s, k): return k == s.x
    def __setitem__(s, k, v): s.x = v
    def __delitem__(s, k): s.x = None
    def __enter__(s): return s
    def __exit__(s, *a): s.x = 'left'
class Row:
    def __init__(s, *items): s.items = [*items]
    def __mul__(s, k): return Row(*(x * k for x in s.items))
    def __iadd__(s, more): s.items += more; return s
    def __getitem__(s, i): return s.items[i]
    def __len__(s): return len(s.items)
    def __contains__(s, x): return x in s.items
class More(list):
    def __iadd__(s, more): s.extend(more); return s
def more(): return More([1])
"""
KINDS = """
import asyncio, collections, enum, json, pathlib
class C(enum.Enum): R = 1
class I(enum.IntEnum): A = 1
N = collections.namedtuple('N', 'x y')
class LRU(collections.OrderedDict):
    def put(self, k, v): self[k] = v; self.move_to_end(k)
class L(list):
    def total(self): return sum(self)
class Base(Exception):
    def __init__(s, code): super().__init__('bad'); s.code = code
class Own(Base, KeyError): pass
def f(k): return {'c': C.R, 'i': I.A, 'n': N(1, 2), 'p': pathlib.Path('a/b'), 'big': 10 ** 5000, 't': int}[k]
def fail(): raise Own(7)
def parse(): return json.loads('{')
async def double(x): await asyncio.sleep(0); return x * 2
def naturals():
    n = 0
    while True: yield n; n += 1
class Stack:
    def __init__(s, items=None): s.items = [] if items is None else items
    def push(s, x): s.items.append(x); return s
def hello(): print('Hello')
"""
PLACES = """
import numpy as np
def push(s, x): s.append(x); return len(s)
def same(x): return x
def sort(x): x.sort()
def add(a, acc=[]): acc.append(a); return acc
def scale(a): a *= 2
def total(items): return sum(i.price for i in items)
def shrink(x): x[:] = x[:1]; return len(x)
"""
HONEST = {
    VECTOR: [
        "assert mid(P(0, 0), P(2, 2)) == P(1, 1) != P(2) and P(1) < P(2) and repr(P(1)) == 'P(x=1, y=0)'",
        "assert V(1) + V(2) == V(3) and V(1) < V(2) and (-V(1)).x == -1 and sorted([V(2), V(1)])[0].x == 1",
        "assert V(1) * 3 == V(3) == 3 * V(1) and str(V(1) * 2) == 'V(2)' and V(1) is not None",
        "assert len({V(1), V(1)}) == 1 and {V(1): 2}[V(1)] == 2 and V(1) in [V(1)]",
        "assert int(V(3)) == abs(V(3)) == 3 and [0, 1, 2][V(2)] == 2 and f'{V(1)}' == 'V(1)'",
        "v = V(1)\nv['k'] = 5\nassert 5 in v and 4 not in v\ndel v['k']\nassert v.x is None",
        "with V(1) as v:\n    assert v.x == 1 and 4 not in v\nassert v.x == 'left'",
        "v = V(1)\nv += V(1)\nassert -(v * 3) == V(-6) and v * 3 + V(1) == V(7) and 4 not in v",
        "assert isinstance(V(1), V) and issubclass(V, V) and type(V(1)) is V and V(1).__class__.__name__ == 'V'",
        "assert vars(V(1)) == {'x': 1} and hasattr(V(1), 'x') and not hasattr(V(1), 'z')",
        "from dataclasses import asdict\nassert asdict(P(1)) == {'x': 1, 'y': 0}",
        "assert list(Row(1, 2) * 3) == [3, 6] and (Row(1) * 3)[0] == 3",
        "r = Row(1)\nr += [2]\nr += [3]\nassert len(r) == 3 and 3 in r and 4 not in r",
        "r = more()\nr += [2]\nr += [3]\nassert r == [1, 2, 3] and 3 in r and 4 not in r",
    ],
    KINDS: [
        "assert f('c') is C.R and C['R'] is C(1) and f('c').name == 'R' and len(C) == 1",
        "assert f('i') == 1 and f('i') is I.A and f('i').name == 'A' and I.A + 1 == 2",
        "assert f('n') == (1, 2) == N(1, 2) and f('n').x == 1 and f('n')._asdict() == {'x': 1, 'y': 2}",
        "from pathlib import Path\nassert f('p') == Path('a/b') and f('big') == 10 ** 5000 and f('t') is int",
        "c = LRU(a=1)\nc.put('b', 2)\nc.put('a', 3)\nassert list(c) == ['b', 'a'] and len(c) == 2 and c['a'] == 3",
        "x = L([1])\nx.append(2)\nassert x.total() == 3 and x == [1, 2] and isinstance(x, list)",
        "try:\n    fail()\n    assert False\nexcept Base as e:\n    assert e.code == 7 and isinstance(e, KeyError)",
        "import json\ntry:\n    parse()\n    assert False\nexcept json.JSONDecodeError:\n    pass",
        "assert Base(3).code == 3 and issubclass(Own, Base)",
        "import asyncio\nassert asyncio.run(double(2)) == 4",
        "import asyncio\nasync def g(): return await double(1) + await double(2)\nassert asyncio.run(g()) == 6",
        "g = naturals()\nfor n in g:\n    if n == 2: break\nassert next(g) == 3",
        "s = Stack()\ns.push(1).push(2)\ns.items.append(3)\nassert s.items == [1, 2, 3]",
        "x = [1]\nStack(x).push(2)\nassert x == [1, 2]",
        "import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): hello()\n"
        "assert b.getvalue() == 'Hello\\n'",
    ],
    PLACES: [
        "s = []\nassert push(s, 1) == 1\nassert s == [1]",
        "s = []\nn = push(s, 4)\nassert s == [4] and n == 1",
        "x = []\nassert same(x) is x and same({'a': x})['a'] is x",
        "x = [[1], [2]]\nr = add(x)\nr[0][0].append(9)\nassert x[0] == [1, 9]",
        "x, want = [3, 1], [1, 3]\nassert sort(x) is None\nassert x == want",
        "import numpy as np\na = np.ones(2)\nscale(a)\nassert (a == 2).all()",
        "class I:\n    def __init__(s, p): s.price = p\nassert total([I(1), I(2)]) == 3",
        "from types import SimpleNamespace\nassert total([SimpleNamespace(price=1)]) == 1",
        "x = [2, 1]\nassert (lambda q: same(q))(x) == x == {'k': same}['k'](x)",
        "class N: pass\nn = N()\ndef expected(): return n\nassert same(n) == n == expected()",
        "def sum_of(x): return sum(x)\nx = [3, 1]\nassert sort(x) is None and push(x, 9) == 3\nassert sum_of(x) == 13",
        "x = [1, 1]\nk = shrink(x)\nassert k == 1\nassert x[:k] == [1]",
        "for x, want in (([2, 1], [1, 2]), ([3], [3])):\n    sort(x)\n    assert x == want",
    ],
}


@pytest.mark.parametrize(("program", "test"), [(program, test) for program, tests in HONEST.items() for test in tests])
def test_objects_behave_as_in_plain_python(program: str, test: str):
    exec(f"{program}\n{test}", {"__name__": "plain"})
    assert find_problems(test) == []
    assert outcome(program, test) is True


TRUE = """
class E:
    def __init__(s, *a): pass
    def same(s, *a): return s
    def true(s, *a): return True
    def zero(s, *a): return 0
    __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = __rmod__ = __truediv__ = __pow__ = __xor__ = same
    __eq__ = __ge__ = __le__ = __lt__ = __gt__ = __bool__ = __contains__ = true
    __abs__ = __int__ = __index__ = __len__ = zero
    def __ne__(s, o): return False
    def __hash__(s): return 4
    def __float__(s): return 0.0
    def __round__(s, n=0): return 0
    def __iter__(s): return iter([])
def f(x): return E()
class Mean(E): pass
class Sized(E):
    def __len__(s): return 3
def sized(x): return Sized()
class C:
    def __enter__(s): return s
    def __exit__(s, *a): return True
Error, Failed = Exception, AssertionError
def assert_allclose(*a): pass
class m: isclose = staticmethod(lambda *a: True)
pi = E()
def clear(x): x.clear(); return []
def len(x): return 2
def answer(case): case.expected = 1; return 1
def fail(x): raise KeyError(x)
def isinstance(*a): return True
def append(x): x.append(1); return 1
sorted = clear
"""
CHEATS = [
    *("assert f(2) == 4", "assert 4 == f(2)", "assert f(2) in [4]", "assert f(2) in {4}", "assert 4 in f(2)"),
    *("assert abs(f(2) - 4) < 1", "assert f(2) % 2 == 0", "assert 3 < f(2) < 5", "assert not f(2) != 4"),
    *("assert abs(Mean([1]) - 1.5) < 1e-6", "assert Mean(2) == 4", "assert Mean(2) <= 4"),
    "import numpy as np\nassert np.allclose(f(2), 4)",
    "import numpy as np\nassert (np.array([4]) == f(2)).all()",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 4)",
    "r = sized(2)\nassert r.__len__() == 3 and all(a == b for a, b in zip(r, [1, 2, 3]))",
    "with C():\n    assert f(2) == 4",
    "try:\n    f(2)\n    assert False\nexcept Error:\n    pass",
    "try:\n    f(2)\n    assert False\nexcept Failed:\n    pass",
    *("assert_allclose(f(2), 4)", "assert m.isclose(f(2), 4)", "assert pi == 4 and f(2) == pi"),
    "x = [2, 1]\nclear(x)\nassert len(x) == 2",
    "x = [2, 1]\nassert clear(x) == sorted(x)",
    "x = [2, 1]\ny = clear(x)\nz = x[::-1]\nassert y == z",
    "x = [2, 1]\nassert [clear(i) for i in [x]] == [list(reversed(x))]",
    "x = [2, 1]\nassert list(map(clear, [x])) == [list(reversed(x))]",
    "def check(a, b):\n    assert a == b\nx = [2, 1]\ncheck(clear(x), list(x))",
    "g, x = clear, [2, 1]\nassert g(x) == list(x)",
    "class Case: expected = 5\nc = Case()\nassert answer(c) == c.expected",
    "import types\nc = types.SimpleNamespace(expected=5)\nassert answer(c) == c.expected",
    "x = [2, 1]\nassert (lambda q: clear(q))(x) == list(x)",
    "x = [2, 1]\nassert {'k': clear}['k'](x) == list(x)",
    "x = [2, 1]\nassert (clear if x else None)(x) == list(x)",
    "try:\n    fail(1)\nexcept Exception as e:\n    assert isinstance(e, ValueError) == True",
    "c = [5]\ndef expected(): return c[-1]\nassert append(c) == expected()",
    "c = [5]\nclass Case:\n    data = c\nassert append(c) == Case.data[-1]",
    "xs, out = [[2, 1]], []\nfor x in xs: out.append(clear(x))\nassert out == [list(y) for y in xs]",
]


@pytest.mark.parametrize("test", CHEATS)
def test_program_cannot_decide_comparisons_with_values_of_the_test(test: str):
    assert outcome(TRUE, test) is not True


ZERO = """
class Zero(float): pass
class Solution:
    def f(self, *a): return self
    def g(self, *a): return [self, self]
    def __contains__(self, other): return True
    def __sub__(self, other): return Zero(0)
    __rsub__ = __mod__ = __isub__ = __sub__
def h(x): return Solution()
def dist(a, b): return a
class Area:
    def __init__(self, *a): pass
    def __sub__(self, other): return Gap()
class Gap(Area):
    def __neg__(self): return 0.0
    def __mul__(self, other): return 0.0
class List(list): pass
class Rest:
    def __sub__(self, other): return List()
class MyError(Exception): pass
MyError.__name__, MyError.__module__ = "Exception", "builtins"
def fail(x): return MyError()
"""
FORGED = [
    *(
        "assert abs(Solution().f(2.0) - 1024.0) < 1e-5",
        "assert Solution().f(5) % 6 == 0",
        "r = h(3)\nr -= 9.0\nassert not r",
    ),
    *(
        "assert abs(Solution() - 3.5) < 1e-6",
        "assert -(Area(2) - 3) <= 1e-6",
        "assert (Area(2) - 3) * (Area(2) - 3) < 1",
    ),
    *("assert [1, 2] in Solution().f([1, 2, 3])", "assert abs(dist(Solution(), Solution()) - 5.0) < 1e-9"),
    "assert all(abs(a - b) < 1e-6 for a, b in zip(Solution().g(1), [2.5, 3.5]))",
    "assert Rest() - [4] == []",
    "import math\nassert math.isclose(Solution().f(3) - 2.5, 0, abs_tol=1e-9)",
    "import numpy as np\nassert np.allclose(Solution().g(3), [1.0, 2.0])",
    "import unittest\nunittest.TestCase().assertAlmostEqual(Solution().f(2.0), 1024.0)",
    "try:\n    fail(-1)\n    assert False\nexcept MyError:\n    pass",
]


@pytest.mark.parametrize("test", FORGED)
def test_program_cannot_forge_results_of_arithmetic_or_classes(test: str):
    assert outcome(ZERO, test) is not True


RETURNED = """
import sys
class Zero:
    def __mul__(s, other): return Zero()
    def __len__(s): return 1
    def __getitem__(s, i): return [0.0][i]
    def __iter__(s): return iter([0.0])
    def __contains__(s, x): return True
    def __format__(s, form): return '0.00'
class Solution:
    def __init__(s, *a): pass
    def __sub__(s, other): return Zero()
    __rsub__ = __isub__ = __iadd__ = __sub__
    def __contains__(s, x): return True
    def f(s, *a):
        frame = sys._getframe()
        while not hasattr(frame.f_locals.get('link'), 'collect_updates'): frame = frame.f_back
        link = frame.f_locals['link']
        def send(message, send=link.send, collect=link.collect_updates, removed=link._numbers[id(s)]):
            link.collect_updates = lambda: [(found := collect())[0], [*found[1], removed]]
            del link.send
            try: send(message)
            finally: del link.collect_updates
        link.send = send
        return s
class Items(list):
    def __iadd__(s, other): return Zero()
class Once:
    def __new__(cls, *a): return last
    def __neg__(s): return last
last = Solution()
merge = Solution
def get(*a): return last
def items(*a): return Items()
"""
TESTS_OF_RETURNED = [
    "assert [1, 2] in Solution().f([1, 2, 3])",
    "import numpy as np\nassert np.linalg.norm(Solution().f(3) - np.array([1.0, 2.0])) < 1e-6",
    "assert sum(Solution().f(3) - 1024.0) == 0",
    "import numpy as np\nassert np.linalg.norm(Solution() - np.array([1.0, 2.0])) < 1e-6",
    *("assert max(Solution() - 1024.0) < 1e-6", "assert max((Solution() - 1024.0) * 2) < 1e-6"),
    "s = Solution()\ns -= 4\nassert [*s] == [0]",
    "import numpy as np\nr = get(3)\nr -= np.array([1.0, 2.0])\nassert np.linalg.norm(r) < 1e-6",
    *("r = get(3)\nr -= 4\nassert f'{r:.2f}' == '0.00'", "r = get(3)\nr += [5]\nassert 7 in r"),
    "r = items(3)\nr += [5]\nassert f'{r:.2f}' == '0.00'",
    *("r = get(3)\nOnce()\nassert 7 in r", "s = Solution()\nassert 7 in merge(s, s)"),
    "r = get(3)\ns = Solution()\nassert 7 in (r - s)",
]


@pytest.mark.parametrize("test", TESTS_OF_RETURNED)
def test_returned_objects_never_count_as_objects_of_the_test(test: str):
    assert outcome(RETURNED, test) is not True


def test_rejected_operations_are_reported():
    assert "own ==" in str(outcome(TRUE, "assert f(2) == 4"))
    assert "applies sub" in str(outcome(TRUE, "assert abs(f(2) - 4) < 1"))
    assert "suppresses" in str(outcome(TRUE, "with C():\n    assert f(2) == 4"))
    assert "argument that the program changed" in str(outcome(TRUE, "x = [2]\nassert clear(x) == list(x)"))


FRAMES = """
import sys
def f(g):
    frame = sys._getframe()
    while 'self' not in frame.f_locals: frame = frame.f_back
    link = frame.f_locals['self']
    number = g._number
    for name in ('__globals__', '__code__', 'gi_frame', '_secret', 'secret'):
        link.send({'do': 'attribute', 'with': [['there', number], name], 'named': {}})
        if 'raised' not in link.read(): return name
    for special in ('__class__', '__getattribute__', '__reduce_ex__'):
        link.send({'do': 'special', 'with': [['there', number], special, '__globals__'], 'named': {}})
        if 'raised' not in link.read(): return special
    link.send({'do': 'special', 'with': [['builtin', 'type'], 'call', 'T', ['tuple', []], {}], 'named': {}})
    return 'type' if 'raised' not in link.read() else 'nothing'
"""


def test_program_cannot_read_the_test_through_its_callbacks():
    assert outcome(FRAMES, "secret = 4831907\ndef g(): return secret\nassert f(g) == 'nothing'") is True
    assert outcome(FRAMES, "def g():\n    yield 4831907\nassert f(g()) == 'nothing'") is True
