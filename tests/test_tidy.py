"""The house rules that a program can check: short files, short functions, docstrings, asserts without effects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for folder in ("asyncdist", "server", "bench", "examples") for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70  # to see it at once; its docstring does not count
FACES = (
    "__init__.py",
    "asyncdist/errors.py",
    "asyncdist/functional.py",
    "asyncdist/weights/vllm.py",
)  # users import these

Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees: TypeAlias = list[tuple[str, ast.Module]]


@pytest.fixture(scope="module")
def trees() -> Trees:
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in FILES]


def function_lines(function: Function) -> int:
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1


def exported(tree: ast.Module) -> set[str] | None:
    """What `__all__` lists, or None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return None


def says_it_again(tree: ast.Module) -> bool:
    """Whether `__all__` lists what has no underscore: every such class and function, and nothing from elsewhere."""
    listed = exported(tree)
    if listed is None or any(name.startswith("_") for name in listed):
        return False
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef | Function)}
    return not imported & listed and all(name.startswith("_") for name in named - listed)


def undocumented(tree: ast.Module) -> Iterator[str]:
    """The module, its public classes and its public functions that have no docstring."""
    if tree.body and not ast.get_docstring(tree):
        yield "module"
    listed = exported(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not ast.get_docstring(node):
            public = node.name in listed if listed is not None else not node.name.startswith("_")
            overload = "overload" in {ast.unparse(decorator) for decorator in node.decorator_list}
            if public and not overload:
                yield f"{node.name} (line {node.lineno})"


def has_effect(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Await | ast.NamedExpr | ast.Yield | ast.YieldFrom) for node in ast.walk(test))


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {path: count for path, count in lines.items() if count > MAX_FILE_LINES}


def test_functions_are_short(trees: Trees) -> None:
    assert not [
        f"{path}:{node.lineno} {node.name}: {function_lines(node)} lines"
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, Function) and function_lines(node) > MAX_FUNCTION_LINES
    ]


def test_what_is_public_has_a_docstring(trees: Trees) -> None:
    packages = [(path, tree) for path, tree in trees if path.startswith(("asyncdist/", "server/"))]
    assert not [f"{path}: {name}" for path, tree in packages for name in undocumented(tree)]


def test_names_are_listed_in_faces_and_where_underscores_do_not_say_it(trees: Trees) -> None:
    packages = [(path, tree) for path, tree in trees if path.startswith(("asyncdist/", "server/"))]
    assert not [path for path, tree in packages if not path.endswith(FACES) and says_it_again(tree)]


def test_asserts_have_no_effects(trees: Trees) -> None:
    assert not [
        f"{path}:{node.lineno}"
        for path, tree in trees
        if not path.startswith("asyncdist/testing/")  # as in tests, checking is all that an assert is for
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and has_effect(node.test)
    ]


def test_planted_untidiness_is_found() -> None:
    body = "\n".join(["    x = 1"] * (MAX_FUNCTION_LINES + 1))
    function = ast.parse(f'def f():\n    """Doc.\n\n    More.\n    """\n{body}').body[0]
    assert isinstance(function, Function)
    assert function_lines(function) == MAX_FUNCTION_LINES + 1
    assert list(undocumented(ast.parse("class A: ...\ndef f(): ...\ndef _g(): ..."))) == [
        "module",
        "A (line 1)",
        "f (line 2)",
    ]
    assert list(undocumented(ast.parse("'Doc.'\n__all__ = ['A']\nclass A: ...\ndef f(): ..."))) == ["A (line 3)"]
    assert says_it_again(ast.parse("__all__ = ['A']\nX = 1\nclass A: ...\ndef _f(): ..."))
    assert not says_it_again(ast.parse("__all__ = ['A']\nclass A: ...\ndef f(): ..."))
    assert not says_it_again(ast.parse("from a import A\n__all__ = ['A']"))
    planted = ast.parse("assert (x := f())").body[0]
    assert isinstance(planted, ast.Assert)
    assert has_effect(planted.test)
