# SPDX-License-Identifier: Apache-2.0
"""Contents and roles become what a chat template prints: no text is lost, and prompts keep their beginning."""

from __future__ import annotations

import json
import logging
from random import Random
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError, TemplateLimitError
from fastdeploy.detokenize import chat_template
from fastdeploy.detokenize.chat_template import ChatTemplates, Conversation
from fastdeploy.detokenize.messages import check_messages
from fastdeploy.detokenize.template_probes import ContentForm
from fastdeploy.detokenize.template_process import TemplateProcess
from fastdeploy.detokenize.template_renderer import template_traits
from tests.detokenize.published_templates import LLAMA32, QWEN3

CHATML = """{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"""
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}</>{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}</>{% endfor %}"
BOTH = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}"
    "{{ content | map(attribute='text') | join }}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ text(m.content) }}</>{% endfor %}"
)
BOTH_FOR_USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}</>{% endfor %}"
)
STRICT = (  # as Gemma's
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
)
STRICT_WITH_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</>{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
LEADING_ONLY = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</>{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
HOISTING = (  # as DeepSeek's: system messages from everywhere are printed first
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
DEVELOPER = (  # as that of gpt-oss
    "{% if messages[0].role in ['developer', 'system'] %}<developer>{{ messages[0].content }}</>{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}</>{% endif %}"
    "{% endfor %}"
)
BY_ROLE = (
    "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% elif m.role == 'system' %}<sys>{% else %}"
    "<{{ m.role }}>{% endif %}{{ m.content }}</>{% endfor %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "parts": PARTS,
    "first part": FIRST_PART,
    "both": BOTH,
    "both for users": BOTH_FOR_USERS,
    "strict": STRICT,
    "strict with system": STRICT_WITH_SYSTEM,
    "leading only": LEADING_ONLY,
    "hoisting": HOISTING,
    "developer": DEVELOPER,
    "by role": BY_ROLE,
    "Qwen3": QWEN3,
    "Llama 3.2": LLAMA32,
}


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    conversation = Conversation(check_messages(messages), add_generation_prompt=False, **options)
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}).render(conversation, template)


def talk(roles: str) -> list[dict[str, Any]]:
    """Return a conversation with a message for each letter: system, developer, user, assistant."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"{letter}{i}"} for i, letter in enumerate(roles)]


@pytest.mark.parametrize(
    ("template", "text", "parts"),
    [
        (CHATML, "<user>a</>", "<user>a\nb</>"),
        (PARTS, "<user>a</>", "<user>ab</>"),
        (FIRST_PART, "<user>a</>", "<user>a\nb</>"),
        (BOTH, "<user>a</>", "<user>ab</>"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", '"a"', '"a\\nb"'),
        ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", "a", "a\nb"),
        ("{% for m in messages %}{{ m.content if m.content is string else m.content[0] }}{% endfor %}", "a", "a\nb"),
    ],
    ids=["ChatML", "parts", "first part", "both", "as JSON", "characters", "part as it is"],
)
def test_content_becomes_what_the_template_reads(template: str, text: str, parts: str) -> None:
    assert render(template, {"role": "user", "content": "a"}) == text
    assert render(template, {"role": "user", "content": ["a", {"type": "text", "text": "b"}]}) == parts
    assert render(template, {"role": "user", "content": ["a"]}) == text


def test_content_is_read_by_role() -> None:
    contents = [{"role": role, "content": ["a", "b"]} for role in ("system", "user", "assistant", "tool")]
    assert render(BOTH_FOR_USERS, *contents[:3]) == "<system>a\nb</><user>ab</><assistant>a\nb</>"
    forms = template_traits(BOTH_FOR_USERS, {}).forms
    assert forms["user"] is ContentForm.BOTH and forms["system"] is forms["tool"] is ContentForm.TEXT


def test_content_format_overrides_what_the_template_reads() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": content}
    assert render(BOTH, message, content_format="string") == "<user>a\nb</>"
    assert render(BOTH, {"role": "user", "content": "a"}, content_format="openai") == "<user>a</>"
    shown = "{{ messages[0].content }}"
    assert "[{'type'" in render(shown, message, content_format="openai")


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (CHATML, "ssusa", "<system>s0</><system>s1</><user>u2</><system>s3</><assistant>a4</>"),
        (CHATML, "du", "<system>d0</><user>u1</>"),
        (BY_ROLE, "sdud", "<sys>s0</><dev>d1</><user>u2</><dev>d3</>"),
        (LEADING_ONLY, "sdu", "<system>s0\n\nd1</><user>u2</>"),
        (LEADING_ONLY, "usausu", "<user>u0</><user>s1</><assistant>a2</><user>u3</><user>s4</><user>u5</>"),
        (LEADING_ONLY, "s", "<system>s0</>"),
        (HOISTING, "suasu", "s0\n<user>u1</><assistant>a2</><user>s3</><user>u4</>"),
        (DEVELOPER, "du", "<developer>d0</><user>u1</>"),
        (DEVELOPER, "sdua", "<developer>s0\n\nd1</><user>u2</><assistant>a3</>"),
        (DEVELOPER, "uad", "<user>u0</><assistant>a1</><user>d2</>"),
        ("<{{ messages[0].role }}>{{ messages[0].content }}", "su", "<user>s0\n\nu1"),
        (STRICT, "su", "<user>s0\n\nu1</>"),
        (STRICT, "sdu", "<user>s0\n\nd1\n\nu2</>"),
        (STRICT, "uasu", "<user>u0</><assistant>a1</><user>s2\n\nu3</>"),
        (STRICT, "uasdu", "<user>u0</><assistant>a1</><user>s2\n\nd3\n\nu4</>"),
        (STRICT, "uas", "<user>u0</><assistant>a1</><user>s2</>"),
        (STRICT, "usau", "<user>u0\n\ns1</><assistant>a2</><user>u3</>"),
        (STRICT_WITH_SYSTEM, "ssuasu", "<system>s0\n\ns1</><user>u2</><assistant>a3</><user>s4\n\nu5</>"),
    ],
)
def test_messages_that_the_template_does_not_take_are_sent_where_it_prints_them(
    template: str, roles: str, expected: str
) -> None:
    assert render(template, *talk(roles)) == expected


def random_roles(random: Random) -> str:
    """Return a conversation of a client: instructions anywhere between the turns of user and assistant."""
    roles = "".join(random.choices("sd", k=random.randrange(3)))
    for _ in range(random.randrange(1, 4)):
        roles += "".join(random.choices("sd", k=random.choice((0, 0, 1, 2)))) + "u"
        roles += "".join(random.choices("sd", k=random.choice((0, 0, 1)))) + "a"
    return roles + random.choice(("", "u", "su", "us"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_is_in_the_prompt_and_earlier_prompts_are_its_beginning(name: str) -> None:
    template, random = TEMPLATES[name], Random(37)
    for _ in range(60):
        roles = random_roles(random)
        messages = talk(roles)
        prompt = render(template, *messages)
        places = [prompt.find(message["content"]) for message in messages]
        assert min(places) >= 0, (roles, prompt)
        assert places == sorted(places), (roles, prompt)
        turns = [i for i, role in enumerate(roles) if role == "a" and i]
        for i in turns:
            earlier = render(template, *messages[:i])
            assert prompt.startswith(earlier), (roles, prompt, earlier)


def test_text_that_a_template_leaves_out_is_refused_by_message_and_role() -> None:
    last_only = "{{ messages[-1].content }}"
    messages = talk("uau")
    with pytest.raises(InvalidRequestError, match="leaves out messages of role 'user'") as caught:
        render(last_only, *messages)
    assert caught.value.field == "messages[0].role"
    no_tools = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    with pytest.raises(InvalidRequestError, match="leaves out messages of role 'tool'") as caught:
        render(no_tools, *messages[:2], result)
    assert caught.value.field == "messages[2].role"


def test_reasoning_and_content_beside_calls_may_be_left_out() -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "reasoning_content": "hm", "content": "so", "tool_calls": [call]}
    assert render(template, {"role": "user", "content": "hi"}, message) == "hi"


class CountingRenderer(chat_template.LocalRenderer):
    """Counts what is rendered for conversations, and the probes."""

    def __init__(self) -> None:
        self.num_rendered = self.num_probes = 0

    def render(self, *arguments: Any) -> str:
        self.num_rendered += 1
        return super().render(*arguments)

    def probe(self, *arguments: Any) -> Any:
        self.num_probes += 1
        return super().probe(*arguments)


@pytest.mark.parametrize(
    ("text", "count"), [(" hi\n", 1), ("a" * 1000, 1), ('say "x"\n', 2)], ids=["short", "long", "escaped"]
)
def test_conversation_is_rendered_once_unless_a_text_is_not_found(text: str, count: int) -> None:
    template = "{% for m in messages %}{{ m.content | tojson if '\"' in m.content else m.content | trim }};{% endfor %}"
    templates, renderer = ChatTemplates({"default": template}, {}), CountingRenderer()
    messages = check_messages([{"role": "user", "content": text}, *talk("au"), {"role": "user", "content": text}])
    for _ in range(3):
        templates.render(Conversation(messages), template, renderer)
    assert (renderer.num_rendered, renderer.num_probes) == (3 * count, 1)


def test_texts_out_of_order_are_found_without_rendering_again() -> None:
    templates, renderer = ChatTemplates({"default": HOISTING}, {}), CountingRenderer()
    last = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}{{ messages[0].content }}"
    templates.render(Conversation(check_messages(talk("suau"))), last, renderer)
    assert renderer.num_rendered == 1


def test_search_for_many_missing_texts_ends_after_a_few() -> None:
    messages = [{"role": "user", "content": f"{i}é"} for i in range(2000)]
    assert not chat_template._has_texts("x" * 2**22, messages)  # a search for each would take minutes


def test_continued_message_may_be_a_list_of_parts() -> None:
    last = {"role": "assistant", "content": [{"type": "text", "text": "So"}, {"type": "text", "text": "it "}]}
    for template, expected in ((PARTS, "<user>u0</><assistant>Soit "), (CHATML, "<user>u0</><assistant>So\nit ")):
        assert render(template, *talk("u"), last, continue_final_message=True) == expected


def test_line_says_once_what_a_template_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastdeploy.server")
    templates = ChatTemplates({"default": STRICT, "other": CHATML}, {})
    for template in (STRICT, CHATML, STRICT):
        templates.render(Conversation(check_messages(talk("u"))), template)
    assert caplog.messages == [
        "the chat template 'default' takes no system messages: they are sent in messages of the user"
    ]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_process_finds_the_same_traits_as_this_process(template: str, process: TemplateProcess) -> None:
    assert process.probe(template, {"bos_token": "<s>"}) == template_traits(template, {"bos_token": "<s>"})


@pytest.fixture(scope="module")
def process() -> Any:
    template_process = TemplateProcess()
    yield template_process
    template_process.close()


def test_template_that_exceeds_a_limit_is_probed_once(process: TemplateProcess) -> None:
    loops = "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(TemplateLimitError, match="processor time"):
        ChatTemplates({}, {}).render(Conversation(check_messages(talk("u"))), loops, process)


def test_traits_of_many_templates_do_not_stay_in_memory() -> None:
    templates = ChatTemplates({}, {})
    for i in range(100):
        templates.traits(f"{{{{ messages[0].content }}}} {i}")
    assert len(templates._traits) == chat_template.MAX_CACHED_TRAITS


def test_own_tokenizer_method_gives_the_template_what_it_was_given() -> None:
    """As in transformers: the messages of `LLM.get_tokenizer().apply_chat_template` are not changed."""
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    conversation = Conversation([message], is_sent_as_given=True)
    text = ChatTemplates({}, {}).render(conversation, "{{ messages[0].content | tojson }}")
    assert json.loads(text) == message["content"]


def test_system_text_that_is_printed_only_before_the_last_user_s_is_never_lost() -> None:
    """Some templates of Mistral print it there, and leave it out while the last message is a result."""
    template = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}<{{ m.role }}>"
        "{% if loop.last and m.role == 'user' and system is defined %}{{ system }}: {% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    assert render(template, *talk("suau")) == "<user>u1<assistant>a2<user>s0: u3"
    assert render(template, *talk("sua")) == "<user>s0\n\nu1<assistant>a2"


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("written", "content", "expected"),
    [
        ("{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}", "so", "so[f]"),
        ("{% if m.tool_calls and not m.content %}[{{ m.tool_calls[0].function.name }}]{% else %}{{ m.content }}"
         "{% endif %}", "so", "[f]"),
        ("{% if m.content is none and m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% else %}{{ m.content }}"
         "{% endif %}", "so", "[f]"),
        ("{% if m.content is none %}{{ m.content | length }}{% endif %}{{ m.content }}"
         "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}", None, "[f]"),
    ],
    ids=["beside content", "without content", "with none", "with a text"],
)  # fmt: skip
def test_calls_are_printed_whatever_the_content_beside_them(written: str, content: Any, expected: str) -> None:
    template = "{{ tools }}{% for m in messages %}" + written + "{% endfor %}"
    message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    assert render(template, *talk("u"), message) == f"Noneu0{expected}"


def test_template_that_fails_without_tools_is_probed_with_tools() -> None:
    template = "{% for t in tools %}{{ t.function.name }} {% endfor %}" + LEADING_ONLY
    traits = template_traits(template, {})
    assert traits.shows_tools and traits.later_roles == ()
