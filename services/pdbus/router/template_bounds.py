"""A Jinja sandbox in which work and memory are bounded, whatever the template says.

Every turn of a loop and every call costs, and every value that is made is paid for by its size written out; so no value
is ever larger than what was paid. To that end the template's tree is changed when it is compiled: loops go over counted
iterables, and what makes values (calls, filters, literals, concatenations, block assignments) passes the till. What
could make a large value of small ones in a single step is either paid beforehand or not there. What only looks through
a value (comparisons, tests, methods of texts, filters that search) costs by its length too, and no text may be larger
than an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import Undefined, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from pdbus.router.template_budget import CHARS_PER_TURN, Budget, TooMuchWork

BUDGET = "_pdbus_budget"
"""The variable that holds a rendering's Budget. A template that sets it itself is refused."""
_COUNTED, _PAID, _SCANNED, _JOINED = "_pdbus_counted", "_pdbus_paid", "_pdbus_scanned", "_pdbus_joined"
_MOST_INDENT = 16

_FILTERS = (
    "abs capitalize count d default dictsort e escape first float forceescape groupby indent int items join last"
    " length list lower map max min reject rejectattr replace reverse safe select selectattr sort string title tojson"
    " trim truncate unique upper wordcount"
).split()
_STR_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace"
    " istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit"
    " rstrip split splitlines startswith strip swapcase title upper".split()
)


_QUICK = frozenset("count d default first last length".split())
"""Filters that don't look through what they are given."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renderings must be given their Budget as the variable BUDGET."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "//"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters |= {"join": _join, "replace": _replace, "indent": _indent, _COUNTED: _counted, _PAID: _paid}
        self.filters |= {_SCANNED: _scanned, _JOINED: _joined}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            raise TooMuchWork("it formats by %")
        if operator == "**" and not (_small(left, 1 << 32) and _small(right, 64)):
            raise TooMuchWork("its powers are too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, Sequence) and isinstance(times, int):
                    each = CHARS_PER_TURN if isinstance(sequence, str | bytes) else 1
                    budget_of(context).spend(len(sequence) * max(times, 0) // each)
        return budget_of(context).pay(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        budget_of(__context).scan(owner)
        for given in (*args, *kwargs.values()):
            budget_of(__context).scan(given)
        if isinstance(owner, str) and method in ("join", "replace"):
            return (_join_text if method == "join" else _replace_text)(budget_of(__context), owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` can widen anything to any size; it is refused like other attributes that are not listed."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Budget) or (isinstance(obj, str) and attr not in _STR_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return tree


def budget_of(context: Context) -> Budget:
    budget = context.get(BUDGET)
    if not isinstance(budget, Budget):
        raise TooMuchWork("it meddles with its bounds")
    return budget


class _Bounding(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(_COUNTED, node.iter)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        if node.filter is None:
            node.filter = nodes.Filter(None, _PAID, [], [], None, None, lineno=node.lineno)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """Its call has to stay one."""
        call = node.call
        self.generic_visit(call)
        node.call = nodes.Call(nodes.Const(None), [], [], None, None)
        self.generic_visit(node)
        node.call = call
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(_PAID, node) if node.ctx == "load" else node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None and node.name not in _QUICK:
            node.node = _through(_SCANNED, node.node)
        return _through(_PAID, node)

    def visit_Call(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _through(_PAID, node)

    visit_List = visit_Dict = visit_Call

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Its texts are joined one by one, each paid before."""
        self.generic_visit(node)
        return _through(_PAID, _through(_JOINED, nodes.List(node.nodes, lineno=node.lineno)))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_PAID, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through(_SCANNED, node.expr)
        for operand in node.ops:
            operand.expr = _through(_SCANNED, operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        node.node = _through(_SCANNED, node.node)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """What is put out inside a macro or a block is kept: a text that was paid once may be put out often."""
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData) else _through(_PAID, one) for one in node.nodes]
        return node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


@pass_context
def _paid(context: Context, value: Any) -> Any:
    return budget_of(context).pay(value)


@pass_context
def _scanned(context: Context, value: Any) -> Any:
    return budget_of(context).scan(value)


@pass_context
def _joined(context: Context, items: Iterable[Any]) -> str:
    return _join_text(budget_of(context), "", items)


class _Counted:
    """An iterable that spends the budget; it keeps its length, which `loop.last` and `loop.length` ask for."""

    def __init__(self, inner: Iterable[Any], budget: Budget) -> None:
        self._items = inner if isinstance(inner, Sequence | Mapping) else list(_spending(inner, budget))
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _spending(self._items, self._budget)


def _spending(items: Iterable[Any], budget: Budget) -> Iterator[Any]:
    for item in items:
        budget.spend()
        yield item


@pass_context
def _counted(context: Context, iterable: Any) -> Any:
    return iterable if isinstance(iterable, Undefined) else _Counted(iterable, budget_of(context))


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = [context.environment.getattr(item, attribute) for item in value]
    return _join_text(budget_of(context), str(d), value)


@pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int = -1) -> str:
    return _replace_text(budget_of(context), str(text), old, new, count)


@pass_context
def _indent(context: Context, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As jinja2's, for sane widths."""
    by = width if isinstance(width, str) else " " * min(width, _MOST_INDENT + 1)
    if len(by) > _MOST_INDENT:
        raise TooMuchWork("it indents too far")
    lines = str(text).split("\n")
    budget_of(context).spend(len(lines))
    return "\n".join(by + line if (line or blank) and (first or number) else line for number, line in enumerate(lines))


def _join_text(budget: Budget, by: str, items: Iterable[Any]) -> str:
    texts: list[str] = []
    for item in items:
        texts.append(str(item))
        budget.spend(1 + (len(by) + len(texts[-1])) // CHARS_PER_TURN)
    return by.join(texts)


def _replace_text(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old)
    times = found if count is None or count < 0 else min(count, found)
    budget.spend(1 + times * len(new) // CHARS_PER_TURN)
    return text.replace(old, new, times)


def _small(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= most
