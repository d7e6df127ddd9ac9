"""Chat templates, grown from a grammar of what Jinja has and of what would hurt."""

from __future__ import annotations

from random import Random

_NAMES = ("messages", "m", "ns", "x", "bos_token", "loop", "range", "namespace", "cycler", "self", "_pdbus_budget",
          "raise_exception", "tools", "strftime_now", "undefined_one")  # fmt: skip
_ATTRIBUTES = ("content", "role", "__class__", "__init__", "n", "items", "append", "format", "split", "join", "replace",
               "__globals__", "_left", "spend", "strip", "first", "last", "length", "index")  # fmt: skip
_FILTERS = ("tojson", "trim", "join", "list", "length", "replace('x', x)", "indent(99)", "map('upper')", "sort",
            "groupby('role')", "batch(2)", "format(1)", "center(9999)", "attr('__class__')", "unique", "sum",
            "xmlattr", "urlize", "random", "reverse", "safe", "int", "float", "truncate(3)", "max")  # fmt: skip
_CONSTANTS = ("0", "1", "-1", "2 ** 64", "10 ** 9", "'x'", "'é'", "[]", "{}", "none", "true", "1.5", "'x' * 99999",
              "range(9999999)", "'%s'", "[[1]]")  # fmt: skip


def template(rng: Random) -> bytes:
    text = "".join(_statement(rng, 3) for _ in range(rng.randrange(1, 5)))
    if rng.random() < 0.1:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(("{%", "%}", "{{", "}}", "{#", "'", "\0", "{% endfor %}")) + text[at:]
    return text.encode()


def _statement(rng: Random, depth: int) -> str:
    def body() -> str:
        return "".join(_statement(rng, depth - 1) for _ in range(rng.randrange(1, 3)))

    if depth == 0 or rng.random() < 0.3:
        return f"{{{{ {expression(rng)} }}}}"
    forms = (
        lambda: f"{{% for m in {expression(rng)} %}}{body()}{{% endfor %}}",
        lambda: f"{{% for m in messages recursive %}}{body()}{{{{ loop({expression(rng)}) }}}}{{% endfor %}}",
        lambda: f"{{% if {expression(rng)} %}}{body()}{{% else %}}{body()}{{% endif %}}",
        lambda: f"{{% set x = {expression(rng)} %}}{body()}",
        lambda: f"{{% set x %}}{body()}{{% endset %}}",
        lambda: f"{{% set ns = namespace(n={expression(rng)}) %}}{{% set ns.n = {expression(rng)} %}}",
        lambda: f"{{% macro f(x) %}}{body()}{{% endmacro %}}{{{{ f({expression(rng)}) }}}}",
        lambda: f"{{% call(x) f(1) %}}{body()}{{% endcall %}}",
        lambda: f"{{% filter {rng.choice(_FILTERS)} %}}{body()}{{% endfilter %}}",
        lambda: f"{{% generation %}}{body()}{{% endgeneration %}}",
        lambda: rng.choice(("{% break %}", "{% continue %}", "{% include 'x' %}", "{% extends 'x' %}", "text\n")),
    )
    return rng.choice(forms)()


def expression(rng: Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(_NAMES if rng.random() < 0.6 else _CONSTANTS)

    def part() -> str:
        return expression(rng, depth - 1)

    forms = (
        lambda: f"{part()}.{rng.choice(_ATTRIBUTES)}",
        lambda: f"{part()}[{part()}]",
        lambda: f"{part()}[{part()}:{part()}]",
        lambda: f"({part()} {rng.choice(('+', '-', '*', '**', '%', '~', '//', '/', 'in', '==', '<', 'and'))} {part()})",
        lambda: f"({part()} | {rng.choice(_FILTERS)})",
        lambda: f"{part()}({part()})",
        lambda: f"({part()} is {rng.choice(('defined', 'string', 'mapping', 'divisibleby 0', 'sameas 1', 'odd'))})",
        lambda: f"[{part()}, {part()}]",
        lambda: f"{{'a': {part()}}}",
        lambda: f"({part()} if {part()} else {part()})",
    )
    return rng.choice(forms)()
