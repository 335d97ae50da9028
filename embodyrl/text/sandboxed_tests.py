"""Tests of a program of a language model: which names are the program's, and which are never taken from it."""

import ast
import builtins
import copy
import importlib
import sys

from embodyrl.text.sandboxed_calls import TEST, Link, read_attribute, write_attribute
from embodyrl.text.sandboxed_objects import CopiedValue, Remote, get_number

_TESTED = "tested "
"""Prefix of names in the syntax tree of a test that are looked up in the program, even if a built-in has the name."""
_MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "numpy", "operator", "random", "re", "statistics", "string", "unittest", "pytest"),
)
_FUNCTIONS = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque",
        "math": "isclose isnan isinf isfinite inf pi nan tau",
        "numpy": "allclose array_equal array_equiv",
        "numpy.testing": "assert_allclose assert_almost_equal assert_approx_equal assert_array_almost_equal "
        "assert_array_equal assert_array_less assert_equal assert_string_equal",
        "pytest": "approx raises",
        "copy": "deepcopy",
        "fractions": "Fraction",
        "decimal": "Decimal",
    }.items()
    for name in names.split()
}
"""Module of each function or constant that a test may apply to results, by name.

Tests use the real functions: a program could define a function that accepts any result."""
_RUNS_CODE = {"ctypes", "marshal", "pickle", "runpy", "shelve"}
"""Modules that could execute a result of the program in the process of the test."""
_OUT_OF_REACH = ("patch", "getsource", "signature", "getfullargspec", "iscoroutinefunction")
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem)


def find_problems(source):
    """Return the reasons why a test cannot verify a program."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return [f"is not valid Python: {error}"]
    reasons = []
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    if all(isinstance(node, definitions) for node in tree.body):
        reasons.append("only defines functions or classes, and calls nothing")
    analysis = _Analysis(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and analysis.may_be_result(node.args):
            name = node.func.id
            if name.startswith("assert") and name not in analysis.defined and name not in _FUNCTIONS:
                reasons.append(f"calls {name}, which the program could define to accept anything; import {name}")
            if name in ("eval", "exec") and name not in analysis.defined:
                reasons.append(f"applies {name} to a result, which could execute code in the process of the test")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            reasons += [f"imports {name}, which could execute a result" for name in sorted(_RUNS_CODE & imported)]
        elif isinstance(node, ast.ClassDef):
            reasons += [
                f"derives class {node.name} from {base.id}, a class of the program in another process"
                for base in node.bases
                if isinstance(base, ast.Name)
                and not base.id.endswith(("Error", "Exception"))
                and analysis.is_program_name(base.id)
            ]
        elif (
            isinstance(node, ast.MatchClass)
            and isinstance(node.cls, ast.Name)
            and analysis.is_program_name(node.cls.id)
        ):
            reasons.append(f"matches a pattern of {node.cls.id}, a class of the program in another process")
        elif isinstance(node, ast.Name) and node.id in ("monkeypatch", "capsys", "capfd"):
            reasons.append(f"uses {node.id}, a fixture of pytest")
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)).split(".")[-1] in _OUT_OF_REACH:
            reasons.append(f"uses {name}, which cannot reach the program in another process")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "unittest.main":
            reasons.append("uses unittest.main, which exits; raise an exception for a failure")
    return reasons


def program_names(source):
    """Return the names that a test uses and does not define; none if the test is invalid."""
    try:
        analysis = _Analysis(ast.parse(source))
    except (SyntaxError, ValueError):
        return set()
    return {name for name in _get_loaded_names(analysis.tree) if name not in analysis.defined | analysis.parameters}


class _Analysis:
    """Static facts about the names of a test; names of trusted modules (`known`) are never the program's."""

    def __init__(self, tree, known=()):
        self.tree, nodes = tree, list(ast.walk(tree))
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        self.defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        self.defined |= {(n.asname or n.name).partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
        self.parameters = {
            arg.arg for function in functions for arg in ast.walk(function.args) if isinstance(arg, ast.arg)
        }
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        self.defined |= {*known} | stored | {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
        self.results: set[str] = set()
        size = -1
        while len(self.results) != size:
            size = len(self.results)
            for node in nodes:
                if isinstance(node, ast.FunctionDef) and self.has_result(node.body):
                    self.results.add(node.name)
                elif isinstance(node, _ASSIGNMENTS):
                    names = [stored for source, stored in _get_assignments(node) if self.has_result([source])]
                    self.results = self.results.union(*names)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self.has_result(node.args):
                    self.results |= {_get_root_name(node.func)} & stored  # as in `found.append(f(x))`
        self.passed = {
            name
            for node in nodes
            if self._calls_program(node)
            for arg in _arguments(node)
            for name in _get_loaded_names(arg)
        }
        assignments = [node for node in nodes if isinstance(node, _ASSIGNMENTS)]
        self._edges = [
            (self._names_outside_calls(source), stored)
            for node in assignments
            for source, stored in _get_assignments(node)
        ]

    def is_program_name(self, name):
        """Return True if a name is neither defined by the test nor built in."""
        return name not in {"", *self.defined, *self.parameters} and not hasattr(builtins, name)

    def _calls_program(self, node):
        """Return True for a call of a function or method of the program, also by a parameter or a result."""
        if not isinstance(node, ast.Call):
            return False
        names = {_get_root_name(node.func), *(arg.id for arg in _arguments(node) if isinstance(arg, ast.Name))}
        if _get_root_name(node.func) in self.results | self.parameters - {"self"}:
            return True
        if any(isinstance(arg, ast.Lambda) and self.has_result([arg.body]) for arg in _arguments(node)):
            return True
        # `map(f, x)` calls the program, too.
        return any(
            name.startswith(_TESTED) or (self.is_program_name(name) and name not in _FUNCTIONS) for name in names
        )

    def has_result(self, nodes):
        """Return True if one of the nodes contains a result of the program, directly or by a variable."""
        return any(
            self._calls_program(part) or (isinstance(part, ast.Name) and self._is_result(part.id))
            for node in nodes
            for part in ast.walk(node)
        )

    def _is_result(self, name):
        return name in self.results or (self.is_program_name(name) and name not in _FUNCTIONS)

    def may_be_result(self, nodes):
        """Return True if one of the nodes may contain a result, or an argument that the program may have changed."""
        names = self.parameters | self.passed
        return self.has_result(nodes) or any(name in names for node in nodes for name in _get_loaded_names(node))

    def find_conflicts(self):
        """Return the variables that the test passes to the program and compares with results of the program.

        The program must not decide both sides of a comparison, so that such variables are passed as copies.
        """
        names = set()
        comparisons = [
            node
            for node in ast.walk(self.tree)
            if (isinstance(node, ast.Compare) and not all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops))
            or (isinstance(node, ast.Call) and not self._calls_program(node) and ast.unparse(node.func) not in _NEUTRAL)
        ]
        for name in self.passed - self.results:
            derived = _closure(name, self._edges) - self.results
            derived |= _closure(name, [(stored, loaded) for loaded, stored in self._edges])
            for comparison in comparisons:
                parts = (
                    [comparison.func, *_arguments(comparison)]
                    if isinstance(comparison, ast.Call)
                    else [comparison.left, *comparison.comparators]
                )
                if any(
                    derived & self._names_outside_calls(part)
                    and self.has_result(other for other in parts if other is not part)
                    for part in parts
                ):
                    names.add(name)
        return names

    def _names_outside_calls(self, node):
        """Return the names that a node loads outside of arguments of calls of the program."""
        if self._calls_program(node):
            return _get_loaded_names(node.func)
        if isinstance(node, ast.Name):
            return {node.id} if isinstance(node.ctx, ast.Load) else set()
        return {name for part in ast.iter_child_nodes(node) for name in self._names_outside_calls(part)}


_TYPE_CHECKS = ("isinstance", "issubclass")
_NEUTRAL = ("all", "any", "bool", "print", "range", "type")


def _get_root_name(node):
    """Return the name at the begin of an expression such as `name[0].attribute(1)`, or ""."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _closure(name, edges):
    """Return the names that can be reached from a name by edges between sets of names."""
    reached, size = {name}, 0
    while len(reached) != size:
        size = len(reached)
        reached |= {target for sources, targets in edges if reached & sources for target in targets}
    return reached


def _get_loaded_names(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)}


def _get_assignments(node):
    """Return pairs of an expression and the names that store its value, of an assignment, loop or `with` statement."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None) or node.optional_vars or ast.Pass()]
    names = ("iter", "context_expr", "value")
    source = next((getattr(node, name) for name in names if getattr(node, name, None)), ast.Pass())
    pairs_of_names = []
    for target in targets:
        pairs = [(source, target)]
        if isinstance(source, ast.Tuple) and isinstance(target, ast.Tuple) and len(source.elts) == len(target.elts):
            pairs = [*zip(source.elts, target.elts, strict=True)]
        pairs_of_names += [(value, _get_stored_names(part)) for value, part in pairs]
    return pairs_of_names


def _get_stored_names(target):
    parts = [*ast.walk(target)]
    names = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names | {_get_root_name(part) for part in parts if isinstance(part, ast.Subscript | ast.Attribute)}


def _arguments(call):
    return [*call.args, *(keyword.value for keyword in call.keywords)]


class _TestTransformer(ast.NodeTransformer):
    """AST transformer that marks names of the program, copies conflicting arguments, and replaces `type`."""

    def __init__(self, test, kinds):
        self._test, self._kinds, self._copied = test, kinds, test.find_conflicts()
        calls = [node for node in ast.walk(test.tree) if isinstance(node, ast.Call)]
        # The program may define a class such as `Counter`: tests of its own functions and classes mean this class.
        checks = [node.args[1] for node in calls if ast.unparse(node.func) in _TYPE_CHECKS and len(node.args) == 2]
        self._own = {part for node in checks for part in ast.walk(node)} | {node.func for node in calls}
        self.trusted = {}

    def visit_Compare(self, node):
        # `assert sum(1, 2) == 3` tests a function of the program; `assert sum(f(2)) == 3` and `sum(x)` after `f(x)` do
        # not.
        analysis, left = self._test, node.left
        if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and isinstance(node.ops[0], ast.Eq):
            name = left.func.id
            is_test_name = name in analysis.defined | analysis.parameters or analysis.may_be_result(_arguments(left))
            if hasattr(builtins, name) and not is_test_name:
                left.func.id = _TESTED + name
        return self.generic_visit(node)

    def visit_Call(self, node):
        calls = self._test._calls_program(node)
        applied = self._test.may_be_result(_arguments(node))
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name | ast.Attribute) and applied:
            name = function.id if isinstance(function, ast.Name) else function.attr
            root = function.id if isinstance(function, ast.Name) else getattr(function.value, "id", None)
            if name in _FUNCTIONS and root in self._kinds and root not in self._test.defined:
                self.trusted[name] = getattr(importlib.import_module(_FUNCTIONS[name]), name)
                node.func = function = ast.Name(name, ast.Load())
        if calls and isinstance(function, ast.Name) and function.id in self.trusted:
            return node
        if isinstance(function, ast.Name) and function.id == "type" and len(node.args) == 1:
            function.id = "_type"
        if calls:
            node.args = [self._copy(arg) for arg in node.args]
            for keyword in node.keywords:
                keyword.value = self._copy(keyword.value)
        return node

    def visit_Name(self, node):
        is_trusted = node.id in _FUNCTIONS and node not in self._own and isinstance(node.ctx, ast.Load)
        if is_trusted and node.id in self._kinds and self._test.is_program_name(node.id):
            self.trusted[node.id] = getattr(importlib.import_module(_FUNCTIONS[node.id]), node.id)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return ast.Call(ast.Name("_type", ast.Load()), [node.value], [])
        return node

    def _copy(self, node):
        if isinstance(node, ast.Starred):
            return ast.Starred(self._copy(node.value), ast.Load())
        return ast.Call(ast.Name("_copied", ast.Load()), [node], []) if _get_loaded_names(node) & self._copied else node


def _find_trusted_modules(tree, kinds):
    """Return the original modules whose attributes a test uses by a name of the program, by name."""
    modules, attributes = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            attributes.setdefault(node.value.id, set()).add(node.attr)
    for name, attribute_names in attributes.items():
        # A module name refers to this module, even if the program imports another object under the name.
        is_module = name in _MODULES or name in sys.stdlib_module_names
        real = {"np": "numpy"}.get(name, name if is_module else kinds[name])
        if real in _MODULES or (kinds[name] and real == name and name not in _RUNS_CODE):
            module = importlib.import_module(real)
            # A variable of the program may have the name of a module.
            if kinds[name] or all(hasattr(module, attribute) for attribute in attribute_names):
                modules[name] = module
    return modules


class _Names(dict):
    """Globals of a test: a name that the test does not define is looked up in the program.

    Built-ins, and the modules and functions that `_TestTransformer` trusts, are never those of the program.
    """

    def __init__(self, link, kinds, trusted, extra):
        super().__init__(__name__=TEST, __builtins__=builtins, **extra)
        self._link, self._kinds, self._trusted = link, kinds, trusted

    def __missing__(self, name):
        is_tested, name = name.startswith(_TESTED), name.removeprefix(_TESTED)
        if is_tested and (name in self or name not in self._kinds):
            return self[name] if name in self or not hasattr(builtins, name) else getattr(builtins, name)
        if name in self._trusted:
            return self._trusted[name]
        if name not in self._kinds or name.startswith("__") or (hasattr(builtins, name) and not is_tested):
            raise KeyError(name)
        value = self._link.request("name", name)
        if issubclass(type(value), Remote) and name.lstrip("_")[:1].isupper():
            self._link.makers.add(get_number(value))
        return value


class _Copies:
    """Copies of arguments that a test also compares with results of the program."""

    def __init__(self):
        self._created = []

    def __call__(self, value):
        """Return a copy of a container and its containers."""
        duplicate = _copy(value)
        self._created.append((duplicate, repr(duplicate)))
        return duplicate

    def has_changes(self):
        """Return True if the program changed a copy."""
        return any(repr(duplicate) != before for duplicate, before in self._created)


def _copy(value):
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind(map(_copy, value))
    duplicate = copy.copy(value) if kind.__module__ in ("builtins", "collections", "array", "numpy") else value
    if isinstance(duplicate, dict):
        for key, item in duplicate.items():
            duplicate[key] = _copy(item)
    return duplicate


def run_test(source, incoming, outgoing):
    """Run a test against the program in the other process; return the reason why the test is refused, or "".

    Raises:
        Exception: the test fails.
    """
    link, copies = Link(incoming, outgoing, strict=True), _Copies()
    link.operations |= {"attribute": read_attribute, "set": write_attribute}

    def get_kind(value):
        return link.get_type(value) if issubclass(type(value), (Remote, CopiedValue)) else type(value)

    message = link.read()
    if "failed" in message:
        raise RuntimeError(str(message["failed"]))
    kinds = message["names"]
    tree = ast.parse(source, "<test>")
    modules = _find_trusted_modules(tree, kinds)
    transformer = _TestTransformer(_Analysis(tree, modules), kinds)
    tree = ast.fix_missing_locations(transformer.visit(tree))
    names = _Names(link, kinds, modules | transformer.trusted, {"_type": get_kind, "_copied": copies})
    try:
        exec(compile(tree, "<test>", "exec"), names)
    except BaseException:
        if link.rejections:
            return link.rejections[-1]
        if copies.has_changes():
            return "compares a result of the program with an argument that the program changed"
        raise
    finally:
        link.close()
    return ""
