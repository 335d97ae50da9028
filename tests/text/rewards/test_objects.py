"""Objects of programs in tests: what tests may do with them, and how programs try to decide about their tests."""

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
@dataclass
class P:
    x: int
    y: int = 0
def mid(a, b): return P((a.x + b.x) // 2, (a.y + b.y) // 2)
class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __neg__(s): return V(-s.x)
    def __hash__(s): return hash(s.x)
    def __repr__(s): return f"V({s.x})"
    def __int__(s): return s.x
    __index__ = __abs__ = __int__
    def __setitem__(s, k, v): s.x = v
    def __delitem__(s, k): s.x = None
    def __enter__(s): return s
    def __exit__(s, *a): s.x = 'left'
class Row:
    def __init__(s, *items): s.items = [*items]
    def __getitem__(s, i): return s.items[i]
    def __len__(s): return len(s.items)
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
def check(x): assert x > 0
async def double(x): await asyncio.sleep(0); return x * 2
async def doubles(x):
    for i in range(x): yield 2 * i
def naturals():
    n = 0
    while True: yield n; n += 1
def mean():
    total = count = 0
    while True:
        total += yield total / max(count, 1); count += 1
class Stack:
    def __init__(s, items=None): s.items = [] if items is None else items
    def push(s, x): s.items.append(x); return s
def hello(): print('Hello')
"""
PLACES = '''
import array, collections, functools
import numpy as np
def push(s, x): s.append(x); return len(s)
def same(x): return x
def sort(x): x.sort()
def fill(d, s, *, q): d['k'] = [1]; s.add(2); q.append(3)
def scale(a): a *= 2
def total(items): return sum(i.price for i in items)
def rotate(m): m[:] = [list(r) for r in zip(*m[::-1])]
def reverse(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last
def raise_prices(items):
    for i in items: i.price += 1
def copy(x): return [*x]
def count(node): node.mark = 1; return 1
def insert(node, v): node.next = N(v, node.next); return node
class N:
    def __init__(s, v, next=None): s.v, s.next = v, next
def calc(a, *, operation, function=None, self=1): return f'{operation}{a}{self}'
def timed(g):
    """Time g."""
    def h(*a): return h.__name__, g(*a)
    return functools.wraps(g)(h)
def each(items, g): return [g(i) for i in items]
def forms(): return [b'a', bytearray(b'b'), 2j, range(3), {1: {2}}, None, 1.5, array.array('i', [4]), {1: 2}.items()]
def queue(): return collections.deque([1, 2], 2)
'''
NODE = "class N:\n    def __init__(s, v, next=None): s.v, s.next = v, next\n"
LISTED = "def listed(n): return [n.v, *listed(n.next)] if n else []\n"
HONEST = {
    VECTOR: [
        "m = mid(P(0, 0), P(2, 2))\nassert (m.x, m.y) == (1, 1) and repr(P(1)) == 'P(x=1, y=0)'",
        "assert (V(1) + V(2)).x == 3 and (-V(1)).x == -1 and V(1) is not None and V(1) != None",
        "v = V(1)\nassert v == v and len({v, v}) == 1 and {v: 2}[v] == 2 and v in [v]",
        "assert int(V(3)) == abs(V(3)) == 3 and [0, 1, 2][V(2)] == 2 and f'{V(1)}' == 'V(1)' == str(V(1))",
        "v = V(1)\nv['k'] = 5\nassert v.x == 5\ndel v['k']\nassert v.x is None",
        "with V(1) as v:\n    assert v.x == 1\nassert v.x == 'left'",
        "v = V(1)\nv += V(1)\nassert (v + V(1)).x == 3",
        "assert isinstance(V(1), V) and issubclass(V, V) and type(V(1)) is V and V(1).__class__.__name__ == 'V'",
        "assert vars(V(1)) == {'x': 1} and hasattr(V(1), 'x') and not hasattr(V(1), 'z')",
        "r = Row(1, 2)\nassert [*r] == [1, 2] and len(r) == 2 and r[1] == 2 and 2 in r and 3 not in r and not Row()",
        "import copy\nr = copy.deepcopy(Row(1))\nr.items = [3]\nassert r.items == [3]",
    ],
    KINDS: [
        "assert f('c') is C.R == f('c') and C['R'] is C(1) and f('c').name == 'R' and len(C) == 1",
        "assert f('i') is I.A and f('i').name == 'A' and int(f('i')) == 1",
        "assert f('n') == (1, 2) == N(1, 2) and f('n').x == 1 and f('n')._asdict() == {'x': 1, 'y': 2}",
        "from pathlib import Path\nassert f('p') == Path('a/b') and f('big') == 10 ** 5000 and f('t') is int",
        "c = LRU(a=1)\nc.put('b', 2)\nc.put('a', 3)\nassert list(c) == ['b', 'a'] and len(c) == 2 and c['a'] == 3",
        "x = L([1])\nx.append(2)\nassert x.total() == 3 and [*x] == [1, 2]",
        "try:\n    fail()\n    assert False\nexcept Base as e:\n    assert e.code == 7 and isinstance(e, KeyError)",
        "import json\ntry:\n    parse()\n    assert False\nexcept json.JSONDecodeError:\n    pass",
        "import pytest\nwith pytest.raises(AssertionError):\n    check(0)",
        "assert Base(3).code == 3 and issubclass(Own, Base)",
        "import asyncio\nassert asyncio.run(double(2)) == 4",
        "import asyncio\nasync def g(): return await double(1) + await double(2)\nassert asyncio.run(g()) == 6",
        "import asyncio\nasync def g(): return [x async for x in doubles(3)]\nassert asyncio.run(g()) == [0, 2, 4]",
        "g = naturals()\nfor n in g:\n    if n == 2: break\nassert next(g) == 3",
        "g = mean()\nassert next(g) == 0 and g.send(4) == 4 and g.send(8) == 6",
        "s = Stack()\nassert s.push(1).push(2) is s and s.items == [1, 2]",
        "import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): hello()\n"
        "assert b.getvalue() == 'Hello\\n'",
    ],
    PLACES: [
        "x, want = [3, 1], [1, 3]\nassert sort(x) is None\nassert x == want",
        "from collections import deque\nd, s, q = {}, {1}, deque()\nfill(d, s, q=q)\n"
        "assert (d, s, list(q)) == ({'k': [1]}, {1, 2}, [3])",
        "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]",
        "import numpy as np\na = np.ones(2)\nscale(a)\nassert (a == 2).all() and same(a).dtype == a.dtype",
        "class I:\n    def __init__(s, p): s.price = p\nassert total([I(1), I(2)]) == 3",
        "from types import SimpleNamespace\nn = SimpleNamespace(price=1)\nraise_prices([n])\nassert n.price == 2",
        NODE + LISTED + "assert listed(reverse(N(1, N(2, N(3))))) == [3, 2, 1]",
        NODE + LISTED + "assert listed(insert(N(1, N(2)), 5)) == [1, 5, 2]",
        "assert calc(1, operation='add', function=len, self=3) == 'add13'",
        "@timed\ndef g(x): return x + 1\nassert g(1) == ('g', 2) and timed.__doc__ == 'Time g.'",
        "def size(n: N | None) -> int: return 1 + size(n.next) if n else 0\nassert size(N(1, N(2))) == 2",
        "def check(f):\n    assert f([1]) == [1]\ncheck(copy)",
        "assert each([1, -2], abs) == [1, 2] and each(['a', 'b'], 'ab'.index) == [0, 1]",
        "x = [2, 1]\nassert (lambda q: same(q))(x) == x == {'k': same}['k'](x)",
        "class N: pass\nn = N()\nassert same(n) is n and same([n])[0] is n",
        "k = 10\nassert each([1, 2], lambda i: i * k) == [10, 20] == each([1, 2], k.__mul__)",
        "for x, want in (([2, 1], [1, 2]), ([3], [3])):\n    sort(x)\n    assert x == want",
        "import array\nassert forms()[:-1] == [b'a', bytearray(b'b'), 2j, range(3), {1: {2}}, None, 1.5, "
        "array.array('i', [4])] and [*forms()[-1]] == [(1, 2)] and queue().maxlen == 2",
    ],
}


@pytest.mark.parametrize(("program", "test"), [(program, test) for program, tests in HONEST.items() for test in tests])
def test_objects_behave_as_in_plain_python(program: str, test: str):
    exec(f"{program}\n{test}", {"__name__": "plain"})
    assert find_problems(test) == []
    assert outcome(program, test) is True


SEPARATE = [
    "x = [[1], [2]]\nsame(x)[0].append(9)\nassert x == [[1], [2]]",
    "s = []\nassert push(s, 1) == 1 and s == []",
    "class I: price = 1\ni = I()\ntry:\n    raise_prices([i, 4])\nexcept AttributeError:\n    assert i.price == 1",
    "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass I: price: int = 1\ni = I()\n"
    "try:\n    raise_prices([i])\nexcept Exception:\n    assert i.price == 1",
    NODE + "n = N(1)\nassert count(n) == 1 and not hasattr(n, 'mark')",
]


@pytest.mark.parametrize("test", SEPARATE)
def test_functions_that_return_data_or_fail_change_no_argument(test: str):
    assert outcome(PLACES, test) is True


TRUE = """
class E:
    n = 0
    def __init__(s, *a): pass
    def same(s, *a): return s
    def true(s, *a, **k): return True
    def zero(s, *a, **k): return 0
    __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = __rmod__ = __truediv__ = __pow__ = __xor__ = __isub__ = same
    __eq__ = __ge__ = __le__ = __lt__ = __gt__ = __contains__ = true
    __abs__ = __int__ = __index__ = mean = sum = max = zero
    def any(s, *a, **k): return False
    def __ne__(s, o): return False
    def __hash__(s): return 4
    def __float__(s): return 0.0
    def __round__(s, n=0): return 0
    def __bool__(s): E.n += 1; return E.n % 2 == 0
    def difference(s, o): s.other = o; return set()
def f(x): return E()
class Mean(E): pass
class Sized(E):
    def __len__(s): return 3
    def __iter__(s): return iter([])
def sized(x): return Sized()
class C:
    def __enter__(s): return s
    def __exit__(s, *a): return E()
Error, Failed = Exception, AssertionError
def assert_allclose(*a): pass
class math: isclose = staticmethod(lambda *a: True)
pi = E()
def clear(x): x.clear(); return []
def zero(x): x.clear(); return 0
class Case:
    def __setitem__(s, k, v): v.clear()
    def __matmul__(s, v): v.clear(); return s
    def total(s): s.xs.clear(); return 0
def len(x): return 2
abs = fabs = lambda x: 0
isclose = lambda *a: True
all = lambda x: True
def answer(case): case.expected = 1; return 1
def cut(n): n.next = None; return n.v
def fail(x): raise KeyError(x)
def isinstance(*a): return True
def g(x): return 77
async def later(x): return 77
def add(b): b += -4; return 0
def solve(b): b.is_solved = lambda: True
def each(xs, g): pass
def timed(g): return lambda *a: None
class Emitter:
    def on(s, g): s.g = g
    def emit(s):
        try: s.g('wrong')
        except BaseException: pass
def text(x): return ["__import__('os')._exit(0)"]
sorted = clear
"""
CHEATS = [
    *("assert f(2) == 4", "assert 4 == f(2)", "assert f(2) in [4]", "assert f(2) in {4}", "assert 4 in f(2)"),
    *("assert {f(2)} == {4}", "assert [f(2)] == [4]", "assert f(2) == f(2)", "assert sorted([f(1), f(2)])[0].n"),
    *("assert abs(f(2) - 4) < 1", "assert f(2) % 2 == 0", "assert 3 < f(2) < 5", "assert not f(2) != 4"),
    *("assert abs(Mean([1]) - 1.5) < 1e-6", "assert Mean(2) == 4", "assert Mean(2) <= 4"),
    *("r = f(2)\nr -= 4\nassert not r", "assert [1, 2] in Mean([1, 2, 3])", "assert Mean(1) - [4] == []"),
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 4)",
    "import unittest\nunittest.TestCase().assertSetEqual(f(2), {1, 2})",
    *(f"import numpy as np\nassert np.{test}" for test in ("mean((f(2) - 4) ** 2) < 1", "sum(f(2) - [4, 5]) == 0")),
    *(f"import numpy as np\nassert {test}" for test in ("not np.any(f(2) - 4)", "np.max(f(2) - np.ones(2)) < 1")),
    "import copy\nassert max(copy.copy(f(2) - 4)) < 1",
    "r = sized(2)\nassert r.__len__() == 3 and all(a == b for a, b in zip(r, [1, 2, 3]))",
    "with C():\n    assert f(2) == 4",
    "with C():\n    assert g(2) == 4",
    "from contextlib import ExitStack\nwith ExitStack() as s:\n    s.enter_context(C())\n    assert g(2) == 4",
    "try:\n    f(2)\n    assert False\nexcept Error:\n    pass",
    "try:\n    f(2)\n    assert False\nexcept Failed:\n    pass",
    *("assert pi == 4 and f(2) == pi", "assert isclose(g(2), 4)", "assert fabs(g(2) - 4) < 1"),
    *("assert abs(g(2) - 4) < 1", "assert math.isclose(g(2), 4)", "assert getattr(math, 'isclose')(g(2), 4)"),
    "for m in (math,):\n    assert m.isclose(g(2), 4)",
    "def same(a, b, m=math): return m.isclose(a, b)\nassert same(g(2), 4)",
    "import asyncio\nasync def get(): return await later(2)\nassert isclose(asyncio.run(get()), 4)",
    "class T:\n    def __init__(s): s.v = g(2)\nassert isclose(T().v, 4)",
    "import heapq\nh = []\nheapq.heappush(h, g(2))\nassert abs(h[0] - 4) == 0",
    "assert all(a == b for a, b in zip([g(2)], [4])) == True",
    "x = [2, 1]\nassert clear(x) == sorted(x)",
    "x = [2, 1]\ny = clear(x)\nz = x[::-1]\nassert y == z",
    "x = [2, 1]\nassert [clear(i) for i in [x]] == [list(reversed(x))]",
    "x = [2, 1]\nassert list(map(clear, [x])) == [list(reversed(x))]",
    "def check(a, b):\n    assert a == b\nx = [2, 1]\ncheck(clear(x), list(x))",
    "import types\nc = types.SimpleNamespace(expected=5)\nassert answer(c) == c.expected",
    "class Case: expected = 5\nc = Case()\nassert answer(c) == c.expected",
    NODE + LISTED + "n = N(1, N(2))\nassert cut(n) == sum(listed(n))",
    "x = [2, 1]\nassert (clear if x else None)(x) == list(x)",
    "x = [2, 1]\nr = clear(x)\nwant = []\nfor i in x: want.append(2 * i)\nassert r == want",
    "x = [2, 1]\nr = zero(x)\nn = 0\nfor i in x:\n    if i == 2: n += 1\nassert r == n",
    "x = [2, 1]\nr = zero(x)\nif x:\n    assert r == 3",
    "x, c = [2, 1], Case()\nc.xs = x\nassert c.total() == sum(x)",
    "x, c = [2, 1], Case()\nc['k'] = x\nassert 0 == sum(x)",
    "x = [2, 1]\nr = Case() @ x\nassert 0 == sum(x)",
    "rows = [[3, 1], [1, 1]]\nrows.sort(key=zero)\nassert rows == [[], []]",
    "try:\n    fail(1)\nexcept Exception as e:\n    assert isinstance(e, ValueError) == True",
    "class B:\n    cells = [0]\n    def is_solved(s): return s.cells == [1]\nb = B()\nsolve(b)\nassert b.is_solved()",
    "import types\nb = types.SimpleNamespace(is_solved=lambda: False)\nsolve(b)\nassert b.is_solved()",
    "def handler(x):\n    assert g(x) == 4\neach([1, 2], handler)",
    "@timed\ndef check():\n    assert g(2) == 4\ncheck()",
    "def handler(x):\n    assert g(x) == 4\neach([1, 2], g=handler)",
    "class B:\n    n = 4\n    def __iadd__(s, k):\n        s.n += k\n        return s\nb = B()\nassert add(b) == b.n",
    "try:\n    assert f(2) < 4\nexcept BaseException:\n    pass",
    "import sympy\nassert sympy.sympify(text(2)[0]) == 7",
    "def got(v):\n    assert v == 4\ne = Emitter()\non = e.on\non(got)\ne.emit()",
    *("assert [*map(eval, text(2))] == [7]", "import builtins\nassert builtins.eval(text(2)[0]) == 7"),
    *("ev = eval\nassert ev(text(2)[0]) == 7", "x = 4", "if __name__ == '__main__':\n    assert g(2) == 4"),
    "DATA = {'a': 1}\ndef check(candidate):\n    assert candidate(2) == 4",
    "'Tests.'\ndef t():\n    assert g(2) == 4",
    "async def main():\n    assert g(2) == 4\nmain().close()",
]


@pytest.mark.parametrize("test", CHEATS)
def test_program_cannot_decide_about_its_test(test: str):
    assert find_problems(test) or outcome(TRUE, test) is not True


FORGED = """
class List(list):
    def __eq__(s, o): return True
class Text(str):
    def __eq__(s, o): return True
    __hash__ = str.__hash__
class MyError(Exception): pass
MyError.__name__, MyError.__module__ = "Exception", "builtins"
def fail(x): return MyError()
import unittest.mock
any_value = unittest.mock._ANY
def f(x): return {'list': List(), 'text': Text(), 'key': {Text('a'): List()}, 'any': unittest.mock.ANY}[x]
"""
TESTS_OF_FORGED = [
    *("assert f('list') == [4]", "assert f('text') == 'b'", "assert f('key') == {'b': [4]}", "assert f('any') == 4"),
    *("assert any_value() == 4", "try:\n    fail(-1)\n    assert False\nexcept MyError:\n    pass"),
]


@pytest.mark.parametrize("test", TESTS_OF_FORGED)
def test_program_cannot_forge_data_or_classes(test: str):
    assert outcome(FORGED, test) is not True


def test_rejected_operations_are_reported():
    assert "by ==" in str(outcome(TRUE, "assert f(2) == 4"))
    assert "applies sub" in str(outcome(TRUE, "assert abs(f(2) - 4) < 1"))
    assert "number of items" in str(outcome(TRUE, "assert [*sized(2)] == []"))
    assert "changes an argument" in str(outcome(TRUE, "x = [2]\nclear(x)\nassert x == []"))
    assert "uses nothing" in str(outcome(TRUE, "x = 4"))


FRAMES = """
import sys
def f(g):
    frame = sys._getframe()
    while 'request' not in frame.f_locals: frame = frame.f_back
    link = frame.f_locals['self']
    me = ['receiver', object.__getattribute__(g, '_number')]
    def ask(do, *args):
        link.send({'do': do, 'args': [*args], 'named': {}})
        return 'raised' not in link.read()
    for name in ('__globals__', '__code__', 'gi_frame', '_secret', 'secret'):
        if ask('getattr', me, name): return name
    for do in ('setitem', 'delattr', 'copy', 'deepcopy', 'enter', 'exit', 'isinstance', 'name', 'await'):
        if ask(do, me, me, me) or ask(do, me, me) or ask(do, me): return do
    for target in (['class', 'builtins', 'type'], ['receiver', 10 ** 6], ['sender', 0, 'object'], None, 'x'):
        if ask('call', target, 'T', ['tuple', [], None], ['dict', [], None]): return target
    return 'nothing'
"""


READERS = """
def by_getattr(g, read): return read(g, '__globals__')['secret']
def by_format(g, read): return read('{0.__globals__[secret]}', g)
"""


def test_program_cannot_read_the_test_through_its_callbacks():
    for test in ("by_getattr(g, getattr)", "by_format(g, str.format)"):
        assert outcome(READERS, f"secret = 7\ndef g(): return 1\nassert int({test}) == 7") is False
    assert outcome(FRAMES, "secret = 4831907\ndef g(): return secret\nassert f(g) == 'nothing'") is True
