# SPDX-License-Identifier: Apache-2.0
"""Chat templates that read a message's content as those of well-known models do, with markers of their own."""

from __future__ import annotations

QWEN3 = """
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {{- '(' + message.reasoning_content + ')' }}
        {%- elif '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<assistant>' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
            {%- set call = tool_call.function %}
            {{- '<call>' + call.name + ' ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- '<' + message.role + '>' + content }}
    {%- endif %}
{%- endfor %}
"""

LLAMA32 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<system>' + system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<' + message['role'] + '>' + message['content'] | trim }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<assistant>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}' }}
    {%- else %}
        {{- '<ipython>' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""

DEEPSEEK_V3 = """
{%- set ns = namespace(is_first=false, is_tool=false) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<user>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.is_tool = false %}
        {%- for tool in message['tool_calls'] %}
            {{- '<assistant><call>' + tool['type'] + ' ' + tool['function']['name'] + ' ' }}
            {{- '```' + tool['function']['arguments'] + '```' }}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.is_tool %}
            {{- '<end of outputs>' + message['content'] }}
        {%- else %}
            {%- set content = message['content'] %}
            {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
            {{- '<assistant>' + content }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<tool>' + message['content'] }}
    {%- endif %}
{%- endfor %}
"""
"""The first form: calls are written only if there is no content."""

DEEPSEEK_V3_0324 = """
{%- set ns = namespace(is_first=false, is_tool=false) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<user>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- set ns.is_first = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.is_first %}
                {%- if message['content'] is none %}
                    {{- '<assistant><calls>' }}
                {%- else %}
                    {{- '<assistant>' + message['content'] + '<calls>' }}
                {%- endif %}
                {%- set ns.is_first = true %}
            {%- endif %}
            {{- '<call>' + tool['type'] + ' ' + tool['function']['name'] + ' ' }}
            {{- '```' + tool['function']['arguments'] + '```' }}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message %}
        {{- ('<end of outputs>' if ns.is_tool else '<assistant>') + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<tool>' + message['content'] }}
    {%- endif %}
{%- endfor %}
"""
"""The later form: calls are written in any case, after the content if there is one."""
