"""Chat templates give the prompt that Hugging Face's give, and can neither reach out nor keep a router busy."""

from __future__ import annotations

import time

import pytest

from pdbus.errors import InvalidRequest
from pdbus.router.chat_template import ChatTemplate
from pdbus.router.openai_schema import ChatMessage

USER = (ChatMessage("user", "hi"),)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": ""}


def render(source: str, messages: tuple[ChatMessage, ...] = USER) -> str:
    return ChatTemplate(source, SPECIAL).render(messages)


def test_messages_special_tokens_and_the_beginning_of_the_answer():
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content | trim }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source, (ChatMessage("system", " be "), *USER)) == "<s>[system]be[user]hi[assistant]"


def test_loops_know_their_place():
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if not loop.last %},{% endif %}{% endfor %}"
    assert render(source, USER * 3) == "1/3,2/3,3/3"


def test_the_usual_helpers():
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert render("{{ messages | map(attribute='role') | list | tojson }}") == '["user"]'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "hi"
    assert render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", USER * 2) == "x"
    assert render("{{ 'none' if tools is none else 'some' }}") == "none"


def test_what_the_template_refuses_is_the_requests_error():
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ raise_exception.__globals__ }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute }}",
        "{{ messages[99].content }}",
    ],
)
def test_nothing_outside_is_reached(source: str):
    try:
        text = render(source)
    except InvalidRequest:
        return
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(9) %}{% set x = b %}{% endfor %}{% endfor %}",
        "{% for a in range(9000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [0] * 1000000000 }}",
        "{{ (9 ** 64) ** 64 }}",
        "{% set ns = namespace(x=9 ** 9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x | join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% set l = [ns] * 99 %}{% set ns.x = 'x' * 999 %}{{ l }}",
        "{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
        "{% macro m0() %}xx{% endmacro %}"
        + "".join(f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}" for i in range(1, 60))
        + "{{ m59() }}",
        "{% set _pdbus_budget = namespace() %}{% for a in messages %}{% endfor %}",
        "{{ _pdbus_budget.spend(-1000000000) }}{{ _pdbus_budget.pay('x') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x' | indent(1000000000, true) }}",
        "{{ range(99999) | list | tojson(indent=1000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        *(
            "{% set x = 'a' * 90000 %}" + source
            for source in (
                "{{ (" + "x ~ " * 900 + "x) | length }}",
                "{% macro m() %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endmacro %}{{ m() | length }}",
                "{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endset %}",
                "{% for i in range(99999) %}{{ x.count('b') }}{% endfor %}",
                "{% for i in range(99999) %}{{ x.startswith(x) }}{% endfor %}",
                "{% for i in range(99999) %}{{ 'ab' in x }}{% endfor %}",
                "{% for i in range(99999) %}{{ x is in x }}{% endfor %}",
                "{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
                "{% for i in range(99999) %}{{ x | wordcount }}{% endfor %}",
            )
        ),
        "{% set x = range(99999) | list %}{% for i in range(99999) %}{{ x | max }}{% endfor %}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped(source: str):
    begun = time.process_time()
    with pytest.raises(InvalidRequest):
        render(source)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}",
        "{% set ns = namespace(found=false) %}{% for m in messages[::-1] %}{% if not ns.found and m.role == 'user' %}"
        "{% set ns.found = true %}{{ m.content.split('x')[-1].lstrip() | trim }}{% endif %}{% endfor %}",
        "{%- set all = messages %}{%- for message in all %}\n{{- loop.index0 ~ message['content'] }}"
        "\n{%- if loop.last or (not loop.last and all[loop.index0 + 1].role != 'x') %}|{%- endif %}\n{%- endfor %}",
        "{% for role, group in messages | groupby('role') %}{{ role }}: "
        "{{ group | map(attribute='content') | join(', ') }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{% macro show(m, first=false) %}{{ m.content | upper }}{{ caller() if caller else '' }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% call show(m) %}!{% endcall %}{% endfor %}"
        "{{ messages | tojson(indent=2) }}",
    ],
)
def test_templates_render_as_hugging_face_renders_them(source: str):
    from transformers.utils.chat_template_utils import _compile_jinja_template

    messages = tuple(ChatMessage(role, f" {role}x<&é'") for role in ("system", "user", "assistant", "user"))
    plain = [{"role": message.role, "content": message.content} for message in messages]
    expected = _compile_jinja_template(source).render(
        messages=plain, add_generation_prompt=True, tools=None, documents=None, **SPECIAL
    )
    assert render(source, messages) == expected


def test_work_may_grow_with_the_input():
    messages = tuple(ChatMessage("user", "x" * 50) for _ in range(4000))
    assert len(render("{% for m in messages %}{{ m.content }}{% endfor %}", messages)) == 200_000


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{% break %}", "{% macro f() %}{% continue %}{% endmacro %}", "{{ " + "(" * 9999 + "}}",
     "{{ 1" + "[0]" * 9999 + " }}"],
    ids=["syntax", "break", "continue", "depth", "length"],
)  # fmt: skip
def test_a_template_that_does_not_compile_is_refused_at_once(source: str):
    """Also where Python refuses the code that jinja2 makes of it."""
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, SPECIAL)
