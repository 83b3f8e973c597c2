"""Whether a chat template wants a message's content as text or as a list of parts.

Templates don't say it; it is read from their syntax tree: one that loops over a message's content
wants parts. Names are followed through `set`, `for` and macro parameters, without regard to scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jinja2 import nodes


def loops_over_content(tree: nodes.Template) -> bool:
    """Whether some `for` of the template runs over a message's content."""
    lists = _closure(tree, {"messages"}, lambda expr, names: _name(expr) in names)

    def is_message(expr: nodes.Node, names: set[str]) -> bool:
        return _name(expr) in names or _is_element(expr, lists)

    loops = [loop for loop in tree.find_all(nodes.For)]
    items = {_name(loop.target) for loop in loops if _name(_bare(loop.iter)) in lists} - {""}
    items = _closure(tree, items, is_message)

    def is_content(expr: nodes.Node, names: set[str]) -> bool:
        return _name(expr) in names or (
            _key(expr) == "content" and is_message(getattr(expr, "node", expr), items)
        )

    contents = _closure(tree, set(), is_content)
    return any(is_content(_bare(loop.iter), contents) for loop in loops)


def _closure(
    tree: nodes.Template, known: set[str], matches: Callable[[nodes.Node, set[str]], bool]
) -> set[str]:
    """All names that get a matching value by `set` or as a macro's argument, at any remove."""
    bindings = [
        *(
            (_name(assign.target), source)
            for assign in tree.find_all(nodes.Assign)
            for source in _sources(assign.node)
        ),
        *_macro_bindings(tree),
    ]
    names = set(known)
    while True:
        found = {target for target, value in bindings if target and matches(value, names)} - names
        if not found:
            return names
        names |= found


def _macro_bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(_name(call.node))
        if macro is None:
            continue
        for parameter, argument in zip(macro.args, call.args, strict=False):
            yield parameter.name, _bare(argument)
        for keyword in call.kwargs:
            if isinstance(keyword, nodes.Keyword):
                yield keyword.key, _bare(keyword.value)


def _sources(expr: nodes.Node) -> Iterator[nodes.Node]:
    """The expressions whose value `expr` may have."""
    expr = _bare(expr)
    if isinstance(expr, nodes.CondExpr):
        yield from _sources(expr.expr1)
        if expr.expr2 is not None:
            yield from _sources(expr.expr2)
    elif isinstance(expr, nodes.Or):
        yield from _sources(expr.left)
        yield from _sources(expr.right)
    else:
        yield expr


def _bare(expr: nodes.Node) -> nodes.Node:
    """Without the filters and slices around it."""
    while True:
        inner = expr.node if isinstance(expr, nodes.Filter) else None
        if isinstance(expr, nodes.Getitem) and isinstance(expr.arg, nodes.Slice):
            inner = expr.node
        if inner is None:
            return expr
        expr = inner


def _name(expr: nodes.Node) -> str:
    return expr.name if isinstance(expr, nodes.Name) else ""


def _key(expr: nodes.Node) -> object:
    """The constant by which an expression takes something out of another, or None."""
    if isinstance(expr, nodes.Getattr):
        return expr.attr
    if isinstance(expr, nodes.Getitem) and isinstance(expr.arg, nodes.Const):
        return expr.arg.value
    return None


def _is_element(expr: nodes.Node, lists: set[str]) -> bool:
    """Whether it is an element of one of the lists: messages[0], messages[i]."""
    return (
        isinstance(expr, nodes.Getitem)
        and not isinstance(expr.arg, nodes.Slice)
        and _name(expr.node) in lists
    )
